"""The closed form: exact from task to task, in any order, through the loop and the artifact."""

from dataclasses import dataclass, field
from itertools import permutations
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from csc.config import resolve
from csc.errors import BadConfig
from csc.methods import build_head, build_method
from csc.methods.base import Method
from csc.nets.backbone import StoredBackbone
from csc.nets.head import grow
from csc.nets.network import Network
from csc.scenario import Scenario
from csc.training.calibration import calibrate
from csc.training.objective import Objective
from csc.training.start import start_task
from tests.unit.training.bench import NEW, fresh_network, grown_network, one_line, saved_model, settings, state_of

FEATURES, SIZES = 6, (2, 1, 3)
RIDGE = ("method=ridge",)
PLAIN = (*RIDGE, "ridge.once=false", "ridge.pooling=mean")


@dataclass
class Taught:
    """Some images as the objective of a task."""

    network: Network
    maps: Tensor
    targets: Tensor
    names: Tensor
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def features(self, pool) -> Tensor:
        return pool(self.maps)

    def labels(self) -> Tensor:
        return self.targets

    def image_digests(self) -> Tensor:
        return self.names


def images_of(task: int, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Maps, labels of the task's own classes (count, SIZES[task]), and names; some images are in several tasks."""
    pool = torch.Generator().manual_seed(0)
    maps = torch.randn(60, FEATURES, 2, 2, generator=pool)
    truth = maps.mean(dim=(2, 3)) @ torch.randn(FEATURES, sum(SIZES), generator=pool) > 0.3
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(task))[:count]
    first = sum(SIZES[:task])
    return maps[rows], truth[rows, first : first + SIZES[task]].float(), rows


def learned(tasks: list[tuple[Tensor, Tensor, Tensor]], *items: str, statistics: Tensor | None = None) -> Method:
    """A method that has solved some tasks, each from the state of the one before alone."""
    config = settings(*(items if "method=l3a" in items else (*PLAIN, *items)))
    built, head, old = build_method(config), build_head(config, FEATURES, (tasks[0][1].shape[1],)), 0
    for maps, labels, names in tasks:
        seen = old + labels.shape[1]
        head = grow(head, seen) if old else head
        if statistics is not None and not old:
            head.standardise(statistics)
        targets = torch.cat([labels.new_zeros(len(labels), old), labels], dim=1)
        network = Network(StoredBackbone({}, FEATURES), head, (0,), (1,))
        built = build_method(config, built.state)
        built.solve(Taught(network, maps, targets, names))
        old = seen
    built.head = head
    return built


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_tasks_one_by_one_give_what_one_solution_over_all_images_gives(order: tuple[int, ...]):
    tasks = [images_of(task) for task in order]
    maps, labels, names = zip(*tasks, strict=True)
    joint = torch.cat(maps), torch.block_diag(*labels), torch.cat(names)
    statistics = images_of(0)[0].mean(dim=(2, 3))
    one_by_one = learned(tasks, "ridge.standardise=false", statistics=statistics)
    at_once = learned([joint], "ridge.standardise=false", statistics=statistics)
    for name in ("A", "C"):
        torch.testing.assert_close(one_by_one.state[name], at_once.state[name], rtol=0, atol=1e-8)
    weights = [built._solution(built.state["A"], built.state["C"]) for built in (one_by_one, at_once)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-8)
    for name, value in one_by_one.head.state_dict().items():
        torch.testing.assert_close(value, at_once.head.state_dict()[name], msg=name)


def test_once_gives_joint_training_with_all_labels_of_all_images():
    # every image of a class is in the task of that class, and an image may be in several tasks
    pool = torch.Generator().manual_seed(0)
    maps = torch.randn(60, FEATURES, 2, 2, generator=pool)
    truth = (torch.rand(60, 4, generator=pool) < 0.4).float()
    rows = [truth[:, columns].any(dim=1).nonzero()[:, 0] for columns in (slice(0, 2), slice(2, 4))]
    tasks = [(maps[rows[0]], truth[rows[0], :2], rows[0]), (maps[rows[1]], truth[rows[1], 2:], rows[1])]
    union = torch.cat(rows).unique()
    assert len(union) < len(rows[0]) + len(rows[1])
    options = ("ridge.standardise=false", "ridge.once=true", "ridge.pooling=mean_max")
    one_by_one, joint = learned(tasks, *options), learned([(maps[union], truth[union], union)], *options)
    torch.testing.assert_close(one_by_one.state["A"], joint.state["A"], rtol=0, atol=1e-8)
    torch.testing.assert_close(one_by_one.state["C"], joint.state["C"], rtol=0, atol=1e-8)
    counted_twice = learned(tasks, "ridge.standardise=false")
    assert counted_twice.state["A"][-1, -1] == len(rows[0]) + len(rows[1])


def test_the_weights_are_those_of_ridge_regression_on_standardised_features():
    maps, labels, names = images_of(0)
    built = learned([(maps, labels, names)], "ridge.penalty=0.5")
    v = maps.mean(dim=(2, 3)).double()
    h = torch.cat([(v - v.mean(0)) / v.std(0, correction=0), torch.ones(len(v), 1)], dim=1)
    A = h.T @ h
    W = torch.linalg.solve(A + 0.5 * A.trace() / len(A) * torch.eye(len(A)), h.T @ labels.double())
    torch.testing.assert_close(built.head.linear.weight.double(), W[:-1].T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(built.head.linear.bias.double(), W[-1], rtol=1e-4, atol=1e-5)


def test_scores_are_the_log_odds_of_two_normal_distributions():
    maps, labels, names = images_of(0, 60)
    head = learned([(maps, labels, names)]).head
    z = head.linear(head.expanded(head.pooled(maps))).double().detach()
    present = labels.bool()
    for c in range(labels.shape[1]):
        inside, outside = z[present[:, c], c], z[~present[:, c], c]
        residual = torch.where(present[:, c], z[:, c] - inside.mean(), z[:, c] - outside.mean())
        share, variance = labels[:, c].double().mean(), residual.square().mean()
        normal = [torch.distributions.Normal(mean, variance.sqrt()) for mean in (inside.mean(), outside.mean())]
        expected = normal[0].log_prob(z[:, c]) - normal[1].log_prob(z[:, c]) + torch.logit(share)
        torch.testing.assert_close(head(maps)[:, c].double(), 8 * (expected / 8).tanh(), rtol=0.02, atol=0.1)


def test_the_root_of_pooled_features_keeps_their_signs():
    head = build_head(settings(*RIDGE, "ridge.pooling=root"), 2, (2,))
    maps = torch.tensor([[[[3.0, 5.0]], [[-8.0, -10.0]]]])
    assert head.pooled(maps).tolist() == [[2.0, -3.0]]


def test_pooling_and_random_features_are_settings_of_the_same_head():
    maps = images_of(0)[0]
    config = settings(*RIDGE, "ridge.pooling=mean_max", "ridge.hidden=16", "seed=3")
    one, two = (build_head(config, FEATURES, (2,)) for _ in range(2))
    assert one.pooled(maps).shape == (len(maps), 2 * FEATURES)
    assert one.expanded(one.pooled(maps)).shape == (len(maps), 16)
    assert torch.equal(one.expansion, two.expansion)  # a matter of the seed, not of what was drawn before
    another = build_head(settings(*RIDGE, "ridge.hidden=16", "seed=4"), FEATURES, (2,))
    assert not torch.equal(one.expansion[:, :FEATURES], another.expansion)


def test_probabilities_of_a_closed_form_are_not_fitted_again(bench):
    solved = bench.trainer(settings(*RIDGE, "threshold=0.4"))
    solved.run()
    fitted = calibrate(solved.objective, None)
    assert fitted["temperature"] == 1
    assert set(fitted["thresholds"].values()) == {0.4}
    assert list(fitted["thresholds"]) == list(solved.objective.classes)


def test_the_loop_solves_in_one_pass_and_leaves_the_backbone_alone(bench):
    config = settings(*RIDGE)
    network = fresh_network(config)
    before = state_of(network.backbone)
    first = bench.trainer(config, network)
    log = first.run()
    assert len(log) == 1
    assert 0 < log[0]["squared_error"] < 1
    assert all(torch.equal(value, before[name]) for name, value in network.backbone.state_dict().items())
    assert not bench.checkpoint.exists()
    second = bench.trainer(config, grown_network(network, 2 * NEW), task=2, state=first.method.state)
    second.run()
    assert second.method.state["C"].shape[1] == 2 * NEW
    again = bench.trainer(config, grown_network(network, 2 * NEW), task=2, state=first.method.state)
    again.run()  # as a try that resumes: the same from the same state
    for name, value in second.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


@pytest.mark.parametrize("name", ["ridge", "l3a"])
def test_a_base_task_can_train_the_backbone_before_it_is_frozen(bench, name: str):
    config = settings(f"method={name}", "backbone.frozen=after_base", "train.epochs=2")
    network = fresh_network(config)
    before, head = state_of(network.backbone), network.head
    first = bench.trainer(config, network)
    log = first.run()
    assert [set(epoch) & {"ce", "squared_error"} for epoch in log] == [{"ce"}, {"ce"}, {"squared_error"}]
    assert network.head is head  # the linear one that the backbone learned under is gone
    trained = state_of(network.backbone)
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())

    second = bench.trainer(config, grown_network(network, 2 * NEW), task=2, state=first.method.state)
    assert len(second.run()) == 1
    assert all(torch.equal(value, trained[name]) for name, value in second.network.backbone.state_dict().items())


def test_a_base_task_that_died_before_its_solution_resumes_from_the_last_epoch(bench):
    config = settings(*RIDGE, "backbone.frozen=after_base", "train.epochs=1")
    whole = bench.trainer(config, fresh_network(config))
    log = whole.run()
    again = bench.trainer(config, fresh_network(config))  # finds the checkpoint of the first
    assert again.run()[0] == log[0]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("overrides", "key"),
    [({"backbone": {"frozen": False}}, "backbone.frozen"), ({"max_entropy": {"beta": 0.1}}, "max_entropy.beta")],
)
def test_what_a_closed_form_cannot_use_is_refused(overrides: dict, key: str):
    with pytest.raises(BadConfig, match=key) as error:
        resolve("voc", {"method": "ridge", **overrides})
    assert one_line(error)


def test_l3a_without_weights_and_pseudo_labels_is_plain_least_squares_on_its_random_features():
    plain = ("method=l3a", "l3a.hidden=16", "l3a.weighting=none", "l3a.pseudo_labels=0")
    tasks = [images_of(task) for task in range(3)]
    maps, labels, names = zip(*tasks, strict=True)
    one_by_one = learned(tasks, *plain)
    at_once = learned([(torch.cat(maps), torch.block_diag(*labels), torch.cat(names))], *plain)
    torch.testing.assert_close(one_by_one.state["A"], at_once.state["A"], rtol=0, atol=1e-8)
    torch.testing.assert_close(one_by_one.state["C"], at_once.state["C"], rtol=0, atol=1e-8)
    assert not one_by_one.head.linear.bias.any()


def test_l3a_standardises_if_it_is_told_to():
    plain, standard = (learned([images_of(0)], "method=l3a", f"l3a.standardise={on}").head for on in ("false", "true"))
    assert not plain.mean.any()
    assert standard.mean.any()


def test_images_of_two_data_sets_with_the_same_names_are_different_images():
    def digests(fingerprint: str) -> torch.Tensor:
        view = SimpleNamespace(fingerprint=fingerprint, table=pa.table({"image_id": ["000001", "000002"]}))
        return Objective.image_digests(SimpleNamespace(examples=SimpleNamespace(view=view, task_rows=2)))  # type: ignore[arg-type]

    assert torch.equal(digests("one"), digests("one"))
    assert not torch.isin(digests("one"), digests("other")).any()


def test_l3a_that_counts_images_once_fills_nothing_in_that_it_has_counted():
    options = ("method=l3a", "l3a.hidden=64", "l3a.penalty=0.01", "l3a.pseudo_labels=0.6", "l3a.weighting=none")
    maps, labels, names = images_of(0)
    again = maps, labels.new_zeros(len(labels), 1), names
    once = learned([(maps, labels, names), again], *options, "l3a.once=true")
    assert torch.equal(once.state["present"], torch.cat([labels.double().sum(0), labels.new_zeros(1).double()]))
    assert once.state["shown"] == len(labels)


def test_a_quirk_of_steps_does_not_stop_a_closed_form(tmp_path):
    config = settings(*RIDGE, "release_quirks.freeze_grown_layers=true")
    first, second = Scenario.parse("digits-b0c5").tasks(tuple("0123456789"))
    folder = saved_model(tmp_path / "first", config, first)
    view = SimpleNamespace(fingerprint="data")
    assert start_task(config, "digits-b0c5", second, view, folder).frozen_parameters == ()


def test_l3a_weighs_images_by_their_rare_classes_and_fills_in_old_ones():
    options = ("method=l3a", "l3a.hidden=64", "l3a.penalty=0.01", "l3a.pseudo_labels=0.6")
    first, second = images_of(0), images_of(1)
    base = learned([first], *options)
    counts = first[1].sum(0).double()
    weights = 2 * counts**-0.5 / (counts**-0.5).sum()
    of_image = (first[1].double() @ weights) / first[1].sum(1).clamp(min=1)
    torch.testing.assert_close(base.state["C"][-1], of_image @ first[1].double())
    with_pseudo, without = (learned([first, second], *options, *more) for more in ((), ("l3a.pseudo_labels=0",)))
    assert (with_pseudo.state["C"][-1, :2] > without.state["C"][-1, :2]).any()
    assert torch.equal(with_pseudo.state["counts"], torch.cat([counts, second[1].double().sum(0)]))
