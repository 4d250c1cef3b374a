"""What makes oEWC, DER++, PODNet, AGCN and replay the methods that they are."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from csc.data.views import View
from csc.errors import BadConfig, BadModel
from csc.methods import build_method
from csc.methods.base import LossInputs, Replay
from csc.nets.correlation import statistical_cm
from csc.nets.head import grow
from csc.nets.label_graph import LabelGraph
from csc.nets.network import Network, Outputs
from csc.replay.memory import Memory
from csc.replay.update import update
from csc.scenario import Task
from tests.unit.training.bench import NEW, Bench, fresh_network, grown_network, settings, state_of

B, OLD = 4, NEW


def step(*, known: Tensor | None = None, replays: tuple[Replay, ...] = (), **distances: Tensor) -> LossInputs:
    torch.manual_seed(0)
    logits, targets = torch.randn(B, OLD + NEW, requires_grad=True), torch.randint(0, 2, (B, OLD + NEW)).float()
    return LossInputs(logits, targets, NEW, torch.randn(B, OLD), known, distances, replays)


def replay(seed: int, stored: int = OLD) -> Replay:
    generator = torch.Generator().manual_seed(seed)
    known = torch.zeros(B, OLD + NEW, dtype=torch.bool)
    known[:, :OLD] = True
    return Replay(
        torch.randn(B, OLD + NEW, generator=generator).requires_grad_(),
        torch.randint(0, 2, (B, OLD + NEW), generator=generator).float(),
        known,
        torch.randn(B, OLD + NEW, generator=generator),
        torch.arange(OLD + NEW).expand(B, -1) < stored,
    )


def slope(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)[0]


# oEWC


def test_the_ewc_penalty_is_zero_at_the_kept_weights_and_grows_with_fisher_and_distance():
    config = settings("method=oewc", "head=linear", "oewc.weight=3")
    network = fresh_network(config)
    fisher = {f"fisher.{name}": torch.rand_like(value) for name, value in network.named_parameters()}
    star = {f"star.{name}": value.detach().clone() for name, value in network.named_parameters()}
    ewc = build_method(config, fisher | star)
    assert ewc.penalty(network)["ewc"].item() == 0
    with torch.no_grad():
        network.head.linear.weight += 0.1
    expected = 3 * 0.01 * fisher["fisher.head.linear.weight"].sum()
    assert ewc.penalty(network)["ewc"].item() == pytest.approx(expected.item(), rel=1e-4)
    with torch.no_grad():
        network.head.linear.weight += 0.1
    assert ewc.penalty(network)["ewc"].item() == pytest.approx(4 * expected.item(), rel=1e-4)


def test_rows_of_a_grown_head_are_free_to_move():
    config = settings("method=oewc", "head=linear")
    before = fresh_network(config)
    state = {f"fisher.{name}": torch.ones_like(value) for name, value in before.named_parameters()}
    state |= {f"star.{name}": value.detach().clone() for name, value in before.named_parameters()}
    network = grown_network(before)
    ewc = build_method(config, state)
    weight = network.head.linear.weight
    with torch.no_grad():
        weight[OLD:] += 5
    assert ewc.penalty(network)["ewc"].item() == 0
    with torch.no_grad():
        weight[:OLD] += 1
    assert torch.equal(slope(ewc.penalty(network)["ewc"], weight)[OLD:], torch.zeros_like(weight[OLD:]))
    assert (slope(ewc.penalty(network)["ewc"], weight)[:OLD] > 0).all()


@pytest.mark.parametrize("size", [1, 3])
def test_fisher_is_the_mean_squared_gradient_of_the_log_likelihood(bench: Bench, size: int):
    config = settings("method=oewc", "head=linear", "train.epochs=1", f"oewc.batch_size={size}", "oewc.samples=6")
    trainer = bench.trainer(config)
    trainer.run()
    network, total = trainer.network.eval(), 0.0
    for batch in trainer.objective.sample_batches(size, 6):
        z, y = network(batch.images), batch.targets
        likelihood = (y * z.sigmoid().log() + (1 - y) * (1 - z.sigmoid()).log()).sum()
        total = total + slope(likelihood, network.head.linear.bias).square()
    kept = trainer.method.state
    torch.testing.assert_close(kept["fisher.head.linear.bias"], total / 6, rtol=1e-4, atol=1e-9)
    assert torch.equal(kept["star.head.linear.bias"], network.head.linear.bias.detach())


def test_a_layer_that_no_map_depends_on_is_not_held(bench: Bench):
    config = settings("method=oewc", "head=linear", "train.epochs=1", "oewc.samples=4")
    network = fresh_network(config)
    network.backbone.unused = torch.nn.Linear(2, 2)
    trainer = bench.trainer(config, network)
    trainer.run()
    assert "star.head.linear.bias" in trainer.method.state
    assert not any("unused" in name for name in trainer.method.state)  # two processes would wait for its gradient


def test_fisher_adds_up_over_tasks_with_its_decay(bench: Bench):
    config = settings("method=oewc", "head=linear", "train.epochs=1", "oewc.samples=4", "oewc.gamma=0.5")
    first = bench.trainer(config)
    first.run()
    earlier = copy.deepcopy(first.method.state)
    bench.checkpoint.unlink()
    once = bench.trainer(config)
    once.run()
    bench.checkpoint.unlink()
    again = bench.trainer(config, state={k: v for k, v in earlier.items() if k.startswith("fisher")})
    again.method.penalty = lambda network: {}  # so that it learns the same
    again.run()
    name = "fisher.head.linear.weight"
    torch.testing.assert_close(again.method.state[name], once.method.state[name] + 0.5 * earlier[name])


# DER++ and replay


def test_derpp_compares_with_the_stored_logits_only_where_there_are_some():
    derpp = build_method(settings("method=derpp", "derpp.alpha=2", "derpp.beta=0.25"))
    dark, labelled = replay(1, stored=3), replay(2)
    terms = derpp.loss(step(replays=(dark, labelled)))
    distance = (dark.logits - dark.stored_logits)[:, :3].square().mean()
    assert terms["logits"].item() == pytest.approx(2 * distance.item(), rel=1e-5)
    summed = build_method(settings("method=derpp", "derpp.alpha=2", "loss.form=asl")).loss(
        step(replays=(dark, labelled))
    )
    assert summed["logits"].item() == pytest.approx(2 * B * distance.item(), rel=1e-5)  # as ASL, a sum over images
    assert torch.equal(slope(terms["logits"], dark.logits)[:, 3:], torch.zeros(B, OLD + NEW - 3))
    assert slope(terms["logits"], labelled.logits) is None
    assert torch.equal(slope(terms["replay"], labelled.logits)[:, OLD:], torch.zeros(B, NEW))  # unknown labels
    assert slope(terms["replay"], dark.logits) is None


def test_derpp_stores_the_logits_of_the_finished_model_and_never_refreshes_them(
    bench: Bench, views: dict[int, View], tasks: tuple[Task, ...]
):
    config = settings("method=derpp", "head=linear", "train.epochs=1")
    trainer = bench.trainer(config)
    trainer.run()

    def remembered(memory: Memory, task: Task, source) -> Memory:
        view = views[task.index]
        return update(memory, view, task, config.memory, seed=0, features=lambda: np.zeros((1, 1)), logits=source)

    first = remembered(
        Memory.empty(views[1].fingerprint), tasks[0], lambda rows: trainer.objective.logits(rows).numpy()
    )
    ids = views[1].table["image_id"].to_pylist()
    rows = [ids.index(name) for name in first.table["image_id"].to_pylist()]
    np.testing.assert_allclose(first.logits, trainer.objective.logits(rows).numpy(), rtol=1e-5, atol=1e-6)
    second = remembered(first, tasks[1], lambda rows: np.full((len(rows), 2 * NEW), 7.0))
    np.testing.assert_array_equal(second.logits[: len(first), :NEW], first.logits)
    assert (second.stored[: len(first)] == NEW).all()
    assert (second.logits[len(first) :] == 7).all()


@pytest.mark.parametrize("name", ["er", "csc-r", "lwf"])
def test_exemplars_among_the_images_count_where_their_labels_are_known(name: str):
    known = torch.zeros(B, OLD + NEW, dtype=torch.bool)
    known[:2, OLD:] = True  # two images of the task
    known[2:, :3] = True  # two exemplars that know three old classes
    sampler = ["memory.sampler=random", "memory.per_class=1"] if name == "lwf" else []
    built = build_method(settings(f"method={name}", *sampler, "memory.replay=concat", "memory.unknown=masked"))
    one = step(known=known)
    terms = built.terms(one)
    assert torch.equal(slope(terms["ce"], one.logits) != 0, known)
    if name != "er":
        distilled = slope(built.terms(one)["kd"], one.logits)
        assert torch.equal(distilled[:, :OLD] != 0, ~known[:, :OLD])
        assert torch.equal(distilled[:, OLD:], torch.zeros(B, NEW))


def test_a_batch_of_exemplars_is_added_with_its_weight():
    built = build_method(settings("method=csc-r", "memory.weight=0.3", "max_entropy.beta=0"))
    drawn = replay(3)
    terms = built.loss(step(replays=(drawn,)))
    plain = torch.nn.functional.binary_cross_entropy_with_logits(drawn.logits[:, :OLD], drawn.targets[:, :OLD])
    assert terms["replay"].item() == pytest.approx(0.3 * plain.item(), rel=1e-5)
    assert set(terms) == {"ce", "kd", "replay"}


@pytest.mark.parametrize("name", ["derpp", "csc-r", "er"])
def test_the_loop_feeds_exemplars_to_the_method(
    bench: Bench, views: dict[int, View], tasks: tuple[Task, ...], name: str
):
    config = settings(f"method={name}", "train.epochs=1", "input.augment=true")
    said = np.arange(20 * NEW, dtype=np.float32).reshape(20, NEW)
    memory = update(
        Memory.empty(views[1].fingerprint),
        views[1],
        tasks[0],
        config.memory,
        seed=0,
        features=lambda: np.random.default_rng(0).normal(size=(len(views[1]), 3)),
        logits=(lambda rows: said[: len(rows)]) if name == "derpp" else None,
    ).extended_to(views[2], tasks[1], config.memory.labels)
    trainer = bench.second(config, memory=memory)
    seen: list[LossInputs] = []
    loss = trainer.method.loss
    trainer.method.loss = lambda step: (seen.append(step), loss(step))[1]
    log = trainer.run()
    assert all(math.isfinite(value) for value in log[0].values())
    remembered = {tuple(row) for row in memory.labels.tolist()}
    if name == "er":
        assert sum(len(step.logits) for step in seen) == len(views[2]) + len(memory)
        of_memory = [row for step in seen for row in step.known.tolist() if any(row[:OLD])]
        assert len(of_memory) == len(memory)
    else:
        assert {len(step.replays) for step in seen} == {trainer.method.replay_batches}
        for drawn in seen[0].replays:
            assert {tuple(row) for row in drawn.targets.bool().tolist()} <= remembered
            assert drawn.known[:, :OLD].all()
            assert (drawn.stored[:, :NEW].all() and not drawn.stored[:, NEW:].any()) == (name == "derpp")
    assert ("replay" in log[0]) == (name != "er")


# PODNet


def inside(network: Network, images: Tensor) -> Outputs:
    return network(images, True)


def test_podnets_distances_vanish_for_identical_networks_only():
    config = settings("method=podnet")
    network = fresh_network(config).eval()
    images = torch.randint(0, 256, (B, 3, 32, 32), dtype=torch.uint8)
    pod, same = build_method(config), inside(network, images)
    none = pod.distances(same, inside(copy.deepcopy(network), images))
    assert all(value.shape == (B,) and value.abs().max() < 1e-6 for value in none.values())
    other = pod.distances(same, inside(fresh_network(config, seed=1).eval(), images))
    assert all(value.min() > 1e-3 for value in other.values())


def test_podnets_spatial_distance_by_hand():
    one, other = torch.tensor([[[[1.0, 2.0], [0.0, 1.0]]]]), torch.tensor([[[[0.0, 1.0], [1.0, 2.0]]]])
    pooled = []
    for stage in (one, other):
        squared = stage[0, 0] ** 2
        values = torch.cat([squared.sum(dim=1), squared.sum(dim=0)])  # over the width, over the height
        pooled.append(values / values.norm())
    expected = (pooled[0] - pooled[1]).norm()
    answers = [Outputs(torch.zeros(1, 1), torch.zeros(1, 1), (stage,), None) for stage in (one, other)]
    distances = build_method(settings("method=podnet")).distances(*answers)
    assert distances["spatial"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert distances["flat"].item() == pytest.approx(0, abs=1e-6)  # one channel: always parallel


def test_podnets_weights_grow_with_the_classes():
    pod = build_method(settings("method=podnet", "podnet.spatial=5", "podnet.flat=180"))
    terms = pod.terms(step(spatial=torch.full((B,), 0.1), flat=torch.full((B,), 0.01)))
    assert terms["spatial"].item() == pytest.approx(5 * math.sqrt(2) * 0.1)
    assert terms["flat"].item() == pytest.approx(180 * math.sqrt(2) * 0.01)


# AGCN


def test_agcn_counts_its_matrix_and_keeps_the_old_nodes(bench: Bench):
    config = settings("method=agcn", "train.epochs=1")
    trainer = bench.second(config)
    trainer.run()
    matrix = trainer.network.head.statistical_cm
    assert not torch.equal(matrix, torch.eye(2 * NEW))
    labels = torch.from_numpy(trainer.view.targets())[:, OLD:]
    prior_cm = trainer.prior.head.statistical_cm
    torch.testing.assert_close(matrix, statistical_cm(labels, trainer.objective.logits_of_prior().cpu(), prior_cm))


def test_agcns_relations_vanish_for_identical_networks_and_touch_old_classes_only():
    config = settings("method=agcn")
    prior = fresh_network(config).eval()
    larger = copy.deepcopy(prior)
    larger.head = grow(prior.head, 2 * NEW)
    larger.head.statistical_cm[:OLD, OLD:] = 0  # old nodes gather from old ones alone
    images = torch.randint(0, 256, (B, 3, 32, 32), dtype=torch.uint8)
    agcn = build_method(config)
    relations = agcn.distances(inside(larger.eval(), images), inside(prior, images))["relations"]
    assert relations.shape == (B,)
    assert relations.abs().max() < 1e-10
    larger.head.statistical_cm[:OLD, OLD:] = 0.2
    assert agcn.distances(inside(larger, images), inside(prior, images))["relations"].min() > 1e-10


def test_the_label_graph_mixes_word_vectors_into_classifiers():
    torch.manual_seed(0)
    graph = LabelGraph(channels=6, classes=3, width=4)
    graph.statistical_cm.copy_(torch.tensor([[1.0, 0.2, 0.0], [0.1, 1.0, 0.0], [0.0, 0.3, 1.0]]))
    maps = torch.randn(2, 6, 3, 3)
    Z, E = graph.statistical_cm.double(), graph.embeddings.double()
    hidden = Z @ E @ graph.W_1.double()
    H = Z @ (torch.where(hidden > 0, hidden, 0.2 * hidden) @ graph.W_2.double())
    expected = maps.amax(dim=(2, 3)).double() @ H.T
    torch.testing.assert_close(graph(maps), expected.float(), rtol=1e-4, atol=1e-5)
    assert {name for name, _ in graph.named_parameters()} == {"W_1", "W_2"}


def test_word_vectors_come_from_a_file_by_class_name(bench: Bench, tmp_path: Path):
    names = [str(digit) for digit in reversed(range(10))]
    vectors = np.random.default_rng(0).normal(size=(10, 300)).astype(np.float32)
    np.savez(tmp_path / "words.npz", classes=np.array(names), vectors=vectors)
    config = settings("method=agcn", "head=label_graph", "train.epochs=1", f"agcn.embeddings={tmp_path / 'words.npz'}")
    trainer = bench.trainer(config)
    before = state_of(trainer.network.head)
    trainer.run()
    expected = np.stack([vectors[names.index(name)] for name in trainer.objective.classes])
    np.testing.assert_array_equal(trainer.network.head.embeddings.numpy(), expected)
    assert not torch.equal(before["W_1"], trainer.network.head.W_1)


@pytest.mark.parametrize(
    "content", [None, b"", b"no archive", "npy", "cut", {"classes": ["0"], "vectors": np.zeros((1, 300))}, "narrow"]
)
def test_bad_word_vectors_are_named_in_one_line(bench: Bench, tmp_path: Path, content):
    path = tmp_path / "words.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros((10, 300)))
    elif content == "cut":
        np.savez(path, classes=np.array(["0"]), vectors=np.zeros((1, 300)))
        path.write_bytes(path.read_bytes()[:-30])
    elif content == "narrow":
        np.savez(path, classes=np.array([str(digit) for digit in range(10)]), vectors=np.zeros((10, 50)))
    elif content is not None:
        np.savez(path, classes=np.array(content["classes"]), vectors=content["vectors"])
    config = settings("method=agcn", "head=label_graph", "train.epochs=1", f"agcn.embeddings={path}")
    with pytest.raises(BadConfig, match=r"agcn\.embeddings=") as error:
        bench.trainer(config).run()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("items", "missing"), [(("method=oewc",), "Fisher information"), (("method=krt", "krt.per_class=true"), "labels")]
)
def test_a_prior_model_of_another_method_without_what_a_method_needs_is_refused(
    bench: Bench, items: tuple[str, ...], missing: str
):
    config = settings(*items, "head=linear", "train.epochs=1")
    with pytest.raises(BadModel, match=f"the prior model has no .*{missing}") as error:
        bench.second(config).run()
    assert "\n" not in str(error.value)


RELABELLED = [("csc-r", "teacher"), *((name, "both") for name in ("csc-r", "agcn-r", "krt-r", "er", "derpp", "podnet"))]


@pytest.mark.parametrize(("name", "relabel"), RELABELLED)
def test_models_fill_in_the_unknown_labels_of_exemplars_if_asked(
    bench: Bench, views: dict[int, View], tasks: tuple[Task, ...], name: str, relabel: str
):
    config = settings(f"method={name}", "memory.labels=own_task", "train.epochs=1", f"memory.relabel={relabel}")
    memory = update(
        Memory.empty(views[1].fingerprint),
        views[1],
        tasks[0],
        config.memory,
        seed=0,
        features=lambda: np.random.default_rng(0).normal(size=(len(views[1]), 3)),
    ).extended_to(views[2], tasks[1], "own_task")
    memory.known[:, 0] = 2  # the first two old classes are unknown, too
    memory.labels[:, :2] = False
    prior = fresh_network(config).eval()
    trainer = bench.trainer(config, grown_network(prior), task=2, prior=prior, memory=memory)
    seen: list[LossInputs] = []
    loss = trainer.method.loss
    trainer.method.loss = lambda step: (seen.append(step), loss(step))[1]
    trainer.run()
    objective = trainer.objective
    own = objective.examples.task_rows
    said = objective.logits_of_prior()[own:] > 0
    assert said[:, :2].any()
    assert torch.equal(objective._exemplar_labels.by_prior[own:, :2], said[:, :2])
    assert not objective._exemplar_labels.by_prior[:own].any()
    assert not objective._exemplar_labels.by_prior[own:, 2:].any()  # what is known stays
    known = objective._exemplar_labels.known[own:]
    assert known[:, :OLD].all()
    assert bool(known[:, OLD:].all()) == (relabel == "both")
    if name == "csc-r":
        drawn = seen[0].replays[0]
        guessed = (drawn.logits > 0).float()[:, OLD:] if relabel == "both" else torch.zeros_like(drawn.logits[:, OLD:])
        assert torch.equal(drawn.targets[:, OLD:], guessed)
