"""Training, from batches to checkpoints, and the models that come out of it."""

import base64
import copy
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import csc.progress
from csc.config import Config, parse_overrides, resolve
from csc.data.dataset import Dataset
from csc.data.digits import ingest_digits
from csc.data.loading import Batch, evaluation_batches, order, training_batches, workers_for
from csc.data.partial import View, train_view
from csc.errors import BadConfig, BadData, BadModel, CscError
from csc.methods import registered
from csc.model import ModelCard, fingerprint, load_network, read_card, save_network
from csc.nets.backbone import Initialisation, build_backbone, initialise
from csc.nets.correlation import statistical_cm
from csc.nets.growth import grow, grown_parameters
from csc.nets.network import Network, build_head
from csc.progress import Progress
from csc.scenario import Scenario, Task
from csc.serving import Predictor, above
from csc.steps.train import _start
from csc.storage import sha256_file
from csc.training import EpochLog, Trainer, confidences, seed_everything

SCENARIO = "digits-b0c5"
ROWS, NEW = 20, 5
TINY = (
    "backbone.name=test_resnet",
    "backbone.output_stride=16",
    "input.size=32",
    "train.epochs=2",
    "train.batch_size=8",
    "train.workers=0",
    "train.channels_last=off",
    "cigcn.width=8",
)
LINEAR = "head=linear"


def settings(*items: str) -> Config:
    """A configuration that trains in a moment; csc unless told otherwise."""
    return resolve("digits", parse_overrides([*TINY, *items]))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for a core shared with other work make these tiny networks ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return ingest_digits(tmp_path_factory.mktemp("digits") / "set", train=60, test=20)


@pytest.fixture(scope="module")
def tasks(dataset: Dataset) -> tuple[Task, ...]:
    return Scenario.parse(SCENARIO).tasks(dataset.classes)


@pytest.fixture(scope="module")
def views(dataset: Dataset, tasks: tuple[Task, ...]) -> dict[int, View]:
    """The first training images of both tasks."""
    return {task.index: first_rows(train_view(dataset, task), ROWS) for task in tasks}


def first_rows(view: View, rows: int) -> View:
    return dataclasses.replace(view, table=view.table.take(list(range(rows))))


def fresh_network(config: Config, classes: int = NEW, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    backbone = build_backbone(config.backbone)
    return Network(backbone, build_head(config, backbone.channels, classes), (0.5,) * 3, (0.25,) * 3)


def grown_network(prior: Network, classes: int = 2 * NEW, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    network = copy.deepcopy(prior)
    network.head = grow(prior.head, classes)
    return network


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def without_speed(log: list[EpochLog]) -> list[EpochLog]:
    return [{name: value for name, value in epoch.items() if name != "images_per_second"} for epoch in log]


@dataclasses.dataclass
class Bench:
    """Makes trainers that share views and one checkpoint file."""

    views: dict[int, View]
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "task.safetensors"

    def trainer(self, config: Config, network: Network | None = None, task: int = 1, **more) -> Trainer:
        options = {"view": self.views[task], "prior": None, "checkpoint": self.checkpoint} | more
        return Trainer(config, network=network or fresh_network(config), new=NEW, task=task, title="task", **options)

    def second(self, config: Config, seed: int = 0, **more) -> Trainer:
        """A trainer of the second task, with the model before it as prior if the method asks for one."""
        prior = fresh_network(config)
        network = grown_network(prior, seed=seed)
        needs_prior = registered()[config.method].needs_prior
        return self.trainer(config, network, task=2, prior=prior.eval() if needs_prior else None, **more)


@pytest.fixture
def bench(views: dict[int, View], tmp_path: Path) -> Bench:
    return Bench(views, tmp_path)


def one_line(error: pytest.ExceptionInfo[CscError]) -> bool:
    text = str(error.value)
    return bool(text) and "\n" not in text


# The loop


@pytest.mark.parametrize("method", sorted(registered()))
def test_every_method_trains_both_tasks_and_logs_its_terms(bench: Bench, method: str):
    config = settings(f"method={method}", "max_entropy.beta=0.1", "train.epochs=1")
    first = bench.trainer(config).run()
    assert set(first[0]) == {"ce", "loss", "images_per_second"}
    bench.checkpoint.unlink()
    second = bench.second(config).run()
    own = {"ce", "kd"} if registered()[method].needs_prior else {"ce"}
    assert set(second[0]) == {*own, "H", "loss", "images_per_second"}
    for epoch in first + second:
        assert all(math.isfinite(value) for value in epoch.values())
        assert epoch["loss"] == pytest.approx(sum(epoch[name] for name in epoch.keys() & {"ce", "kd", "H"}))
        assert epoch["images_per_second"] > 0


def test_training_logs_each_epoch_once_and_learns(bench: Bench):
    told: list[tuple[int, EpochLog]] = []
    config = settings("train.epochs=4", "train.lr_base=0.01", "train.schedule=constant")
    log = bench.trainer(config, on_epoch=lambda epoch, entry: told.append((epoch, entry))).run()
    assert told == list(enumerate(log))
    assert len(log) == 4
    assert log[-1]["ce"] < log[0]["ce"]


def test_the_same_seed_gives_bitwise_equal_weights_and_another_seed_others(bench: Bench):
    def train(seed: int, path: str) -> dict[str, Tensor]:
        config = settings(f"seed={seed}", "input.augment=true", "train.epochs=1")
        seed_everything(config.seed, 1)
        backbone = build_backbone(config.backbone)
        network = Network(backbone, build_head(config, backbone.channels, NEW), (0.5,) * 3, (0.25,) * 3)
        bench.trainer(config, network, checkpoint=bench.folder / path).run()
        return state_of(network)

    one, two, other = train(3, "one.safetensors"), train(3, "two.safetensors"), train(4, "other.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    weights = [name for name, value in one.items() if value.ndim > 1]
    assert not any(torch.equal(one[name], other[name]) for name in weights)


# Resuming


class Killed(Exception):
    """The node went away."""


def die_after(last: int) -> Callable[[int, EpochLog], None]:
    def on_epoch(epoch: int, log: EpochLog) -> None:
        if epoch == last:
            raise Killed

    return on_epoch


RESUMED = [
    ("train.schedule=onecycle",),
    ("train.schedule=constant",),
    ("train.schedule=onecycle", "input.augment=true"),
    ("train.schedule=constant", "train.channels_last=on"),
]


@pytest.mark.parametrize("items", RESUMED, ids="+".join)
def test_a_run_killed_between_epochs_ends_as_if_nothing_had_happened(bench: Bench, items: tuple[str, ...]):
    config = settings("train.epochs=3", *items)
    undisturbed = bench.second(config, checkpoint=bench.folder / "other.safetensors")
    expected = undisturbed.run()
    with pytest.raises(Killed):
        bench.second(config, on_epoch=die_after(0)).run()
    told: list[int] = []
    resumed = bench.second(config, seed=99, on_epoch=lambda epoch, log: told.append(epoch))
    torch.manual_seed(99)  # neither these weights nor this random state may matter any more
    log = resumed.run()
    assert told == [1, 2]
    assert without_speed(log) == without_speed(expected)
    assert changed(state_of(undisturbed.network), resumed.network) == set()


def test_a_resumed_network_with_dropout_draws_what_it_would_have_drawn(bench: Bench):
    def trainer(**more) -> Trainer:
        config = settings(LINEAR, "train.epochs=2")
        network = fresh_network(config)
        network.head = nn.Sequential(nn.Dropout(0.5), network.head)
        return bench.trainer(config, network, **more)

    undisturbed = trainer(checkpoint=bench.folder / "other.safetensors")
    undisturbed.run()
    with pytest.raises(Killed):
        trainer(on_epoch=die_after(0)).run()
    resumed = trainer()
    resumed.run()
    assert changed(state_of(undisturbed.network), resumed.network) == set()


def test_a_finished_task_is_not_trained_again(bench: Bench):
    config = settings(LINEAR, "train.epochs=1")
    first = bench.trainer(config)
    log = first.run()
    again = bench.trainer(config, fresh_network(config, seed=1), on_epoch=die_after(0))
    assert again.run() == log
    assert changed(state_of(first.network), again.network) == set()


@pytest.mark.parametrize("change", ["seed=7", "loss.alpha=0.9", "train.lr_base=0.5", "cigcn.width=6"])
def test_a_checkpoint_of_other_settings_is_not_taken_up(bench: Bench, change: str):
    bench.trainer(settings("train.epochs=1")).run()
    told: list[int] = []
    bench.trainer(settings("train.epochs=1", change), on_epoch=lambda epoch, log: told.append(epoch)).run()
    assert told == [0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(4096)),
    "without facts": lambda path: save_file(load_file(path), path),
    "facts not JSON": lambda path: save_file(load_file(path), path, metadata={"csc": "{"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupted_checkpoint_is_ignored(bench: Bench, damage: str):
    config = settings(LINEAR, "train.epochs=2")
    undisturbed = bench.trainer(config, checkpoint=bench.folder / "other.safetensors")
    undisturbed.run()
    with pytest.raises(Killed):
        bench.trainer(config, on_epoch=die_after(0)).run()
    DAMAGES[damage](bench.checkpoint)
    told: list[int] = []
    again = bench.trainer(config, on_epoch=lambda epoch, log: told.append(epoch))
    again.run()
    assert told == [0, 1]
    assert changed(state_of(undisturbed.network), again.network) == set()


def test_a_checkpoint_is_safetensors_without_a_pickle_and_leaves_nothing_beside_it(bench: Bench):
    trainer = bench.trainer(settings(LINEAR, "train.epochs=1"))
    log = trainer.run()
    start = bench.checkpoint.read_bytes()[:8]
    assert not start.startswith((b"PK", b"\x80"))  # zip of torch.save, pickle
    with safe_open(bench.checkpoint, framework="pt") as file:
        names = set(file.keys())
        facts = json.loads(file.metadata()["csc"])
    assert {f"network.{name}" for name in trainer.network.state_dict()} < names
    assert facts["log"] == log
    assert list(bench.checkpoint.parent.iterdir()) == [bench.checkpoint]


# Optimisation


@pytest.mark.parametrize("head", ["ci_gcn", "linear"])
def test_vectors_and_biases_do_not_decay_and_all_else_does(bench: Bench, head: str):
    trainer = bench.trainer(settings(f"head={head}", "train.weight_decay=0.01"))
    names = {id(value): name for name, value in trainer.network.named_parameters()}
    decay: dict[str, float] = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in decay
            decay[names[id(parameter)]] = group["weight_decay"]
    assert set(decay) == set(names.values())
    for name, value in trainer.network.named_parameters():
        assert decay[name] == (0 if value.ndim == 1 or name.endswith(".bias") else 0.01), name
    assert set(decay.values()) == {0, 0.01}


def learning_rates(trainer: Trainer) -> list[tuple[float, float]]:
    """(backbone, head) rates of each step."""
    names = {id(value): name for name, value in trainer.network.named_parameters()}
    rates: list[tuple[float, float]] = []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        of = {names[id(group["params"][0])].split(".")[0]: group["lr"] for group in optimizer.param_groups}
        rates.append((of["backbone"], of["head"]))

    trainer.optimizer.register_step_pre_hook(record)
    trainer.run()
    return rates


RATES = ("train.lr_base=0.004", "train.lr=0.001", "train.backbone_lr_scale=0.5", "train.batch_size=4", LINEAR)


@pytest.mark.parametrize(("task", "peak"), [(1, 0.004), (2, 0.001)])
def test_one_cycle_peaks_at_the_rate_of_the_task(bench: Bench, task: int, peak: float):
    config = settings(*RATES, "train.schedule=onecycle")
    rates = learning_rates(bench.trainer(config) if task == 1 else bench.second(config))
    head = [rate for _, rate in rates]
    assert len(head) == 2 * ROWS // 4
    assert head[0] == pytest.approx(peak / 25)
    assert head[1] == max(head) == pytest.approx(peak)  # after a fifth of ten steps
    assert head[-1] == pytest.approx(peak / 25 / 1e4)
    assert [rate for rate, _ in rates] == pytest.approx([0.5 * rate for rate in head])


@pytest.mark.parametrize(("task", "rate"), [(1, 0.004), (2, 0.001)])
def test_a_constant_rate_stays(bench: Bench, task: int, rate: float):
    config = settings(*RATES, "train.schedule=constant", "train.epochs=1")
    rates = learning_rates(bench.trainer(config) if task == 1 else bench.second(config))
    assert rates == [(0.5 * rate, rate)] * (ROWS // 4)


@pytest.mark.parametrize(
    ("steps", "pct_start"), [(1, 0.2), (2, 0.5), (3, 0.0), (3, 1.0), (4, 0.2), (4, 0.25), (5, 0.2)]
)
def test_any_number_of_steps_can_be_scheduled(bench: Bench, steps: int, pct_start: float):
    config = settings(LINEAR, f"train.epochs={steps}", f"train.pct_start={pct_start}")
    log = bench.trainer(config, view=first_rows(bench.views[1], 2)).run()
    assert len(log) == steps


def test_a_task_of_one_image_is_refused(bench: Bench):
    with pytest.raises(BadData, match="one training image"):
        bench.trainer(settings("train.epochs=2"), view=first_rows(bench.views[1], 1))


@pytest.mark.parametrize("head", ["ci_gcn", "linear"])
def test_a_frozen_backbone_keeps_weights_and_statistics_while_the_head_learns(bench: Bench, head: str):
    trainer = bench.second(settings(f"head={head}", "backbone.frozen=true", "train.epochs=1"))
    before = state_of(trainer.network)
    log = trainer.run()
    after = changed(before, trainer.network)
    assert after
    assert all(name.startswith("head.") for name in after)
    assert {f"head.{name}" for name, _ in trainer.network.head.named_parameters()} <= after
    assert log[0]["kd"] > 0


def test_an_unfrozen_backbone_learns_weights_and_statistics(bench: Bench):
    trainer = bench.trainer(settings("train.epochs=1"))
    before = state_of(trainer.network)
    trainer.run()
    of_backbone = {name for name in changed(before, trainer.network) if name.startswith("backbone.")}
    assert any(name.endswith("running_mean") for name in of_backbone)
    assert any(name.endswith("weight") for name in of_backbone)


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_the_prior_never_changes_and_answers_in_eval_mode(bench: Bench, frozen: str):
    config = settings(f"backbone.frozen={frozen}", "train.epochs=1")
    prior = fresh_network(config).train()
    before = state_of(prior)
    trainer = bench.trainer(config, grown_network(prior), task=2, prior=prior)
    modes: set[bool] = set()
    prior.head.register_forward_hook(lambda module, *_: modes.add(module.training))
    trainer.run()
    assert changed(before, prior) == set()
    assert modes == {False}
    assert not any(module.training for module in prior.modules())
    assert all(not value.requires_grad and value.grad is None for value in prior.parameters())


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_distillation_compares_with_the_prior_on_the_same_images(bench: Bench, frozen: str):
    """At the first step of a task, all old logits of a linear head agree with the prior's in eval mode."""
    config = settings(
        "method=lwf",
        "loss.alpha=0",
        "train.batch_size=20",
        "train.epochs=1",
        "release_quirks.freeze_bn_after_base=true",
        f"backbone.frozen={frozen}",
    )
    trainer = bench.second(config)
    with torch.no_grad():
        for network in (trainer.network, trainer.prior):
            network.head.linear.weight[:NEW] *= 50  # so that images differ in their logits
    log = trainer.run()
    batch = next(evaluation_batches(bench.views[2], size=32, batch_size=ROWS, workers=0))
    with torch.no_grad():
        p = trainer.prior(batch.images).sigmoid()
    lowest = -(p * p.log() + (1 - p) * (1 - p).log()).mean()  # cross-entropy with itself
    assert p.std(dim=0).min() > 0.01
    assert log[0]["kd"] == pytest.approx(lowest.item(), rel=1e-4)


# Quirks of the release


@pytest.mark.parametrize("head", ["ci_gcn", "linear"])
def test_freeze_grown_layers_leaves_the_named_parameters_untouched(bench: Bench, head: str):
    config = settings(f"head={head}", "train.epochs=1")
    prior = fresh_network(config)
    network = grown_network(prior)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    before = state_of(network)
    bench.trainer(config, network, task=2, prior=prior, frozen_parameters=grown).run()
    after = changed(before, network)
    assert grown
    assert not after & set(grown)
    assert {name for name, _ in network.named_parameters()} - set(grown) <= after


def test_freezing_everything_is_refused_in_one_line(bench: Bench):
    config = settings(LINEAR, "backbone.frozen=true")
    prior = fresh_network(config)
    names = ("head.linear.weight", "head.linear.bias")
    with pytest.raises(CscError) as error:
        bench.trainer(config, grown_network(prior), task=2, prior=prior, frozen_parameters=names)
    assert one_line(error)


@pytest.mark.parametrize(("task", "moves"), [(1, True), (2, False)])
def test_freeze_bn_after_base_keeps_statistics_from_the_second_task_on(bench: Bench, task: int, moves: bool):
    config = settings("release_quirks.freeze_bn_after_base=true", "train.epochs=1")
    trainer = bench.trainer(config) if task == 1 else bench.second(config)
    before = state_of(trainer.network)
    trainer.run()
    after = changed(before, trainer.network)
    statistics = {name for name in before if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert "head.pooled_norm.running_mean" in statistics
    assert after & statistics == (statistics if moves else set())
    assert any(isinstance(module, _BatchNorm) for module in trainer.network.backbone.modules())
    assert "head.W_g.weight" in after


def rows_of_each_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    step = trainer._step
    monkeypatch.setattr(trainer, "_step", lambda batch: (rows.extend(batch.rows.tolist()), step(batch))[1])
    trainer.run()
    return rows


@pytest.mark.parametrize("quirk", [True, False])
def test_no_shuffle_gives_the_rows_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch, quirk: bool):
    trainer = bench.trainer(settings(LINEAR, f"release_quirks.no_shuffle={quirk}"))
    rows = rows_of_each_step(trainer, monkeypatch)
    first, second = rows[:ROWS], rows[ROWS:]
    assert sorted(first) == sorted(second) == list(range(ROWS))
    if quirk:
        assert first == second == list(range(ROWS))
    else:
        assert first != second
        assert first != list(range(ROWS))


@pytest.mark.parametrize("channels_last", ["on", "off"])
def test_persist_optimizer_hands_on_the_moments_of_parameters_that_kept_their_shape(bench: Bench, channels_last: str):
    config = settings("train.epochs=1", "release_quirks.persist_optimizer=true", f"train.channels_last={channels_last}")
    first = bench.trainer(config)
    first.run()
    path = bench.folder / "optimizer.safetensors"
    first.save_optimizer(path)
    network = grown_network(first.network)
    grown = {f"head.{name}" for name in grown_parameters(first.network.head, network.head)}
    second = bench.trainer(
        config, network, task=2, optimizer_state=path, checkpoint=bench.folder / "second.safetensors"
    )
    moments = {name: first.optimizer.state[value] for name, value in first.network.named_parameters()}
    for name, value in network.named_parameters():
        state = second.optimizer.state.get(value, {})
        if name in grown:
            assert not state, name
        else:
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}, name
            assert all(torch.equal(state[key], moments[name][key]) for key in state), name
            assert state["step"] == first.steps
            # The fused update walks through memory: with other strides it would pair weights with others' moments.
            assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == value.stride(), name
            assert state["exp_avg_sq"].abs().max() > 0
    second.run()
    steps = {name: second.optimizer.state[value]["step"].item() for name, value in network.named_parameters()}
    assert {steps[name] for name in grown} == {second.steps}
    assert {steps[name] for name in steps.keys() - grown} == {first.steps + second.steps}


def test_without_the_quirk_each_task_starts_a_fresh_optimiser(bench: Bench):
    assert not bench.second(settings()).optimizer.state


# The statistical matrix


@pytest.mark.parametrize("correlation", ["Z->S", "Z->Z"])
def test_training_fills_the_statistical_matrix_from_labels_and_the_prior(bench: Bench, correlation: str):
    config = settings(f"cigcn.correlation={correlation}", "train.epochs=1")
    first = bench.trainer(config)
    first.run()
    labels = torch.from_numpy(bench.views[1].targets())
    base = first.network.head.statistical_cm
    torch.testing.assert_close(base, statistical_cm(labels))
    assert not torch.equal(base, torch.eye(NEW))

    prior = first.network.eval()
    torch.nn.init.constant_(prior.head.output.bias[2:3], 20.0)  # a prior that sees class 2 everywhere
    second = bench.trainer(
        config, grown_network(prior), task=2, prior=prior, checkpoint=bench.folder / "second.safetensors"
    )
    second.run()
    batch = next(evaluation_batches(bench.views[2], size=32, batch_size=ROWS, workers=0))
    with torch.no_grad():
        logits = prior(batch.images)
    matrix = second.network.head.statistical_cm
    torch.testing.assert_close(matrix, statistical_cm(batch.targets[:, NEW:], logits, base))
    assert torch.equal(matrix[:NEW, :NEW], base)
    assert matrix[2, NEW:].tolist() == pytest.approx([0.25] * NEW)


@pytest.mark.parametrize("method", sorted(registered()))
def test_every_method_can_train_the_second_task_with_a_statistical_matrix(bench: Bench, method: str):
    config = settings(f"method={method}", "head=ci_gcn", "cigcn.correlation=Z->S", "train.epochs=1")
    trainer = bench.second(config)
    trainer.run()
    matrix = trainer.network.head.statistical_cm
    assert matrix.shape == (2 * NEW, 2 * NEW)
    assert matrix.isfinite().all()


# Loading


def load(view: View, *, seed: int = 0, epoch: int = 0, workers: int = 0, augment: bool = True) -> list[Batch]:
    return list(
        training_batches(
            view,
            size=32,
            batch_size=8,
            seed=seed,
            epochs=range(epoch, epoch + 1),
            augment=augment,
            shuffle=True,
            workers=workers,
        )
    )


def by_row(batches: list[Batch]) -> dict[int, Tensor]:
    return {int(row): image for batch in batches for row, image in zip(batch.rows, batch.images, strict=True)}


def same(one: list[Batch], two: list[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and torch.equal(a.rows, b.rows)
        for a, b in pairs
    )


def test_any_number_of_workers_gives_the_same_batches(views: dict[int, View]):
    assert same(load(views[1], workers=0), load(views[1], workers=2))


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_another_order_and_other_augmentation(views: dict[int, View], other: dict):
    first, second = load(views[1]), load(views[1], **other)
    assert same(first, load(views[1]))
    rows = [torch.cat([batch.rows for batch in batches]).tolist() for batches in (first, second)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))
    one, two = by_row(first), by_row(second)
    assert not any(torch.equal(one[row], two[row]) for row in one)


def test_without_augmentation_an_image_is_the_same_in_every_epoch(views: dict[int, View]):
    one, two = by_row(load(views[1], augment=False)), by_row(load(views[1], augment=False, epoch=5))
    assert all(torch.equal(one[row], two[row]) for row in one)


def test_several_epochs_are_those_of_each_alone(views: dict[int, View]):
    options = {"size": 32, "batch_size": 8, "seed": 0, "augment": True, "shuffle": True, "workers": 0}
    together = list(training_batches(views[1], epochs=range(1, 3), **options))
    assert same(together, load(views[1], epoch=1) + load(views[1], epoch=2))


def test_batches_are_bytes_with_the_labels_of_their_rows(views: dict[int, View]):
    for batch in load(views[2]):
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (len(batch.rows), 3, 32, 32)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.targets.dtype == torch.float32
        assert np.array_equal(batch.targets.numpy(), views[2].targets()[batch.rows.numpy()])
        assert batch.targets[:, :NEW].sum() == 0


@pytest.mark.parametrize(
    ("count", "sizes"), [(17, [8, 8]), (18, [8, 8, 2]), (16, [8, 8]), (9, [8]), (8, [8]), (2, [2]), (1, [1])]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_last_batch_of_one_image_is_left_out(count: int, sizes: list[int], shuffle: bool):
    batches = order(count, 8, seed=0, epoch=0, shuffle=shuffle)
    assert [len(rows) for rows in batches] == sizes
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(count))


def test_a_lone_last_image_does_not_stop_training(bench: Bench):
    trainer = bench.trainer(settings("train.epochs=1"), view=first_rows(bench.views[1], 9))
    assert trainer.steps == 1
    assert len(trainer.run()) == 1


def test_evaluation_reads_every_row_once_in_order(views: dict[int, View]):
    batches = list(evaluation_batches(views[1], size=32, batch_size=19, workers=0))
    assert torch.cat([batch.rows for batch in batches]).tolist() == list(range(ROWS))


def test_confidences_do_not_depend_on_the_batch_and_leave_the_network_as_it_was(views: dict[int, View]):
    config = settings()
    network = fresh_network(config).train()
    before = state_of(network)
    rows, values = zip(*confidences(network, views[1], config), strict=True)
    assert torch.cat(rows).tolist() == list(range(ROWS))
    one = next(evaluation_batches(first_rows(views[1], 1), size=32, batch_size=1, workers=0))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(values)[:1], network(one.images).sigmoid(), rtol=1e-4, atol=1e-5)
    assert torch.cat(values).shape == (ROWS, NEW)
    assert changed(before, network) == set()


def test_on_a_cpu_loading_stays_in_the_training_process_unless_told():
    assert workers_for(-1, torch.device("cpu")) == 0
    assert workers_for(3, torch.device("cpu")) == 3
    assert workers_for(-1, torch.device("cuda")) >= 1


def test_a_broken_image_is_reported_by_its_place(views: dict[int, View], tmp_path: Path):
    nowhere = dataclasses.replace(views[1], images=tmp_path)
    with pytest.raises(BadData, match=r"00000\.arrow") as error:
        load(nowhere)
    assert one_line(error)


# Model folders


def card_of(config: Config, task: Task) -> ModelCard:
    return ModelCard(
        method=config.method,
        scenario=SCENARIO,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=json.loads(config.to_json()),
        initialisation=dataclasses.asdict(Initialisation("scratch", "random", "")),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        data_fingerprint="data",
        prior_fingerprint="",
        code_version="test",
    )


def saved_model(folder: Path, config: Config, task: Task, network: Network | None = None) -> Path:
    folder.mkdir()
    save_network(network or fresh_network(config, len(task.seen)), card_of(config, task), folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, tasks: tuple[Task, ...]) -> Path:
    return saved_model(tmp_path / "model", settings(), tasks[0])


@pytest.mark.parametrize(
    "item", ["cigcn.correlation=G->S", "cigcn.correlation=Z->S", "cigcn.plain=true", LINEAR, "train.channels_last=on"]
)
def test_a_saved_model_comes_back_with_identical_logits(bench: Bench, tasks: tuple[Task, ...], item: str):
    config = settings(item, "train.epochs=1")
    trainer = bench.trainer(config)
    trainer.run()  # batch-norm statistics and, with Z, the matrix are no longer the default
    folder = saved_model(bench.folder / "model", config, tasks[0], trainer.network)
    network, card = load_network(folder)
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(network(images), trainer.network.to(memory_format=torch.contiguous_format).eval()(images))
    assert not network.training
    assert card == card_of(config, tasks[0])
    assert card.settings() == config


def test_a_model_folder_holds_no_pickle(model: Path):
    assert sorted(path.name for path in model.iterdir()) == ["model.json", "model.safetensors"]
    assert not (model / "model.safetensors").read_bytes().startswith((b"PK", b"\x80"))


def test_equal_models_have_equal_fingerprints_and_others_not(model: Path, tmp_path: Path, tasks: tuple[Task, ...]):
    twin = saved_model(tmp_path / "twin", settings(), tasks[0])
    other = saved_model(tmp_path / "other", settings(), tasks[0], fresh_network(settings(), seed=1))
    assert fingerprint(model) == fingerprint(twin) != fingerprint(other)


def edit_card(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "model.json").read_text())
        change(content)
        (folder / "model.json").write_text(json.dumps(content))

    return edit


MODEL_DAMAGES = {
    "no card": (lambda folder: (folder / "model.json").unlink(), r"model\.json"),
    "card not JSON": (lambda folder: (folder / "model.json").write_text("{"), r"model\.json"),
    "card not an object": (lambda folder: (folder / "model.json").write_text("[1]"), r"model\.json"),
    "card without classes": (edit_card(lambda card: card.pop("classes")), r"model\.json"),
    "card with a stranger": (edit_card(lambda card: card.update(colour="red")), r"model\.json"),
    "other format": (edit_card(lambda card: card.update(format=2)), "format 2.*reads format 1"),
    "no format": (edit_card(lambda card: card.pop("format")), r"model\.json.*format"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors"),
    "truncated weights": (lambda folder: truncate(folder / "model.safetensors"), r"model\.safetensors"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors"),
    "more classes": (edit_card(lambda card: card["classes"].append("x")), r"model\.safetensors.*fit"),
    "other width": (edit_card(lambda card: card["config"]["cigcn"].update(width=9)), r"model\.safetensors.*fit"),
    "other head": (edit_card(lambda card: card["config"].update(head="linear")), r"model\.safetensors.*fit"),
}


@pytest.mark.parametrize("damage", MODEL_DAMAGES)
def test_a_damaged_model_is_refused_in_one_line(model: Path, damage: str):
    harm, match = MODEL_DAMAGES[damage]
    harm(model)
    with pytest.raises(BadModel, match=match) as error:
        load_network(model)
    assert one_line(error)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, folder: str):
    with pytest.raises(BadModel) as error:
        read_card(tmp_path / folder)
    assert one_line(error)


@pytest.fixture
def first_model(tmp_path: Path, tasks: tuple[Task, ...]) -> Path:
    """The model of the base task, with biases that no fresh layer has."""
    network = fresh_network(settings())
    with torch.no_grad():
        network.head.output.bias.fill_(9.0)
        network.head.specific_cm.bias.fill_(9.0)
    return saved_model(tmp_path / "prior", settings(), tasks[0], network)


@pytest.mark.parametrize("reset", [False, True])
def test_legacy_bias_reset_reaches_the_network_of_the_next_task(
    views: dict[int, View], tasks: tuple[Task, ...], first_model: Path, reset: bool
):
    config = settings(f"release_quirks.legacy_bias_reset={reset}")
    start = _start(config, SCENARIO, tasks[1], views[2], first_model)
    before, _ = load_network(first_model)
    for bias in (start.network.head.output.bias, start.network.head.specific_cm.bias):
        assert (bias[:NEW] == 9).all() != reset
        assert bias[NEW:].abs().max() < 1
    assert torch.equal(start.network.head.output.weight[:NEW], before.head.output.weight)
    assert start.prior is not None
    assert changed(state_of(before), start.prior) == set()
    assert start.card.prior_fingerprint == fingerprint(first_model)


@pytest.mark.parametrize("quirk", [False, True])
def test_frozen_names_and_old_moments_reach_the_trainer_only_with_their_quirks(
    views: dict[int, View], tasks: tuple[Task, ...], first_model: Path, quirk: bool
):
    moments = first_model / "optimizer.safetensors"
    save_file({}, moments)
    config = settings(f"release_quirks.freeze_grown_layers={quirk}", f"release_quirks.persist_optimizer={quirk}")
    start = _start(config, SCENARIO, tasks[1], views[2], first_model)
    assert ("head.general_cm" in start.frozen_parameters) == quirk
    assert start.optimizer_state == (moments if quirk else None)


# Backbones and their first weights


@pytest.mark.parametrize("init", ["scratch", "hub"])
@pytest.mark.parametrize("name", ["no_such_net", "test_resnet.no_such_tag", ""])
def test_an_unknown_backbone_is_refused_in_one_line(name: str, init: str):
    with pytest.raises(BadConfig, match=r"backbone\.name") as error:
        initialise(dataclasses.replace(settings().backbone, name=name), init, allow_leaky=False)
    assert one_line(error)


def test_a_backbone_that_cannot_have_the_output_stride_is_refused_in_one_line():
    with pytest.raises(BadConfig, match="output_stride") as error:
        build_backbone(dataclasses.replace(settings().backbone, name="test_vit"))
    assert one_line(error)


def weights_file(path: Path, **more: Tensor) -> Path:
    torch.manual_seed(5)
    save_file(build_backbone(settings().backbone).net.state_dict() | more, path)
    return path


def test_weights_from_a_file_are_taken_over_and_recorded(tmp_path: Path):
    path = weights_file(tmp_path / "weights.safetensors", **{"fc.weight": torch.zeros(1000, 96)})
    backbone, origin = initialise(settings().backbone, str(path), allow_leaky=False)
    weights = load_file(path)
    assert all(torch.equal(value, weights[name]) for name, value in backbone.net.state_dict().items())
    assert origin == Initialisation("file", "weights.safetensors", sha256_file(path), leaky=False)
    assert str(origin) == f"file weights.safetensors, sha256 {sha256_file(path)[:12]}"


def test_scratch_is_random_and_recorded():
    torch.manual_seed(0)
    one, origin = initialise(settings().backbone, "scratch", allow_leaky=False)
    two, _ = initialise(settings().backbone, "scratch", allow_leaky=False)
    assert str(origin) == origin.kind == "scratch"
    assert not torch.equal(next(one.parameters()), next(two.parameters()))


def wrong_shapes(path: Path) -> None:
    weights = load_file(weights_file(path))
    name = next(name for name, value in weights.items() if value.ndim == 4)
    save_file(weights | {name: torch.zeros(1, 1, 1, 1)}, path)


def missing_tensor(path: Path) -> None:
    weights = load_file(weights_file(path))
    weights.popitem()
    save_file(weights, path)


BAD_WEIGHTS = {
    "pickle": ("weights.pth", lambda path: path.write_bytes(b"\x80\x02}q\x00."), "safetensors"),
    "missing": ("weights.safetensors", lambda path: None, "no such file"),
    "folder": ("weights.safetensors", lambda path: path.mkdir(), "no such file"),
    "garbage": ("weights.safetensors", lambda path: path.write_bytes(b"\xff" * 999), "not readable"),
    "empty": ("weights.safetensors", lambda path: path.write_bytes(b""), "not readable"),
    "truncated": ("weights.safetensors", lambda path: truncate(weights_file(path)), "not readable"),
    "wrong shapes": ("weights.safetensors", wrong_shapes, "another shape"),
    "missing tensor": ("weights.safetensors", missing_tensor, "missing"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_unusable_weights_are_refused_in_one_line(tmp_path: Path, case: str):
    name, make, match = BAD_WEIGHTS[case]
    make(tmp_path / name)
    with pytest.raises(BadModel, match=match) as error:
        initialise(settings().backbone, str(tmp_path / name), allow_leaky=False)
    assert one_line(error)
    assert name in str(error.value)


LEAKY = {
    "zoo name": ("MS_COCO_TRresNet_M_224_81.8.safetensors", {}),
    "renamed as told": ("tresnet_m_224_21k.safetensors", {}),
    "80-way head": ("innocent.safetensors", {"head.fc.weight": torch.zeros(80, 96), "head.fc.bias": torch.zeros(80)}),
}


@pytest.mark.parametrize("case", LEAKY)
def test_weights_tuned_on_coco_are_refused_unless_allowed_and_then_marked(tmp_path: Path, case: str):
    name, head = LEAKY[case]
    path = weights_file(tmp_path / name, **head)
    with pytest.raises(BadModel, match="allow_leaky_init") as error:
        initialise(settings().backbone, str(path), allow_leaky=False)
    assert one_line(error)
    backbone, origin = initialise(settings().backbone, str(path), allow_leaky=True)
    assert origin.leaky
    assert "LEAKED" in str(origin)
    weights = load_file(path)
    assert all(torch.equal(value, weights[key]) for key, value in backbone.net.state_dict().items())


def test_without_internet_the_hub_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def offline(*_: object):
        raise OSError("Network is unreachable\nand a long trace")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(BadModel, match=r"init=/path/to/weights\.safetensors") as error:
        initialise(settings().backbone, "hub", allow_leaky=False)
    assert one_line(error)
    assert "test_resnet" in str(error.value)


def test_weights_from_the_hub_are_safetensors_and_recorded_by_name_and_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[tuple[str, ...]] = []

    def hub(*words: str) -> str:
        asked.append(words)
        return str(weights_file(tmp_path / "model.safetensors"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    backbone, origin = initialise(settings().backbone, "hub", allow_leaky=False)
    assert asked == [("timm/test_resnet.r160_in1k", "model.safetensors")]
    assert (origin.kind, origin.source, origin.leaky) == ("hub", "test_resnet", False)
    assert origin.sha256 == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in backbone.net.state_dict().items())


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when told."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(csc.progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run_epochs(stream: io.StringIO, clock: SimpleNamespace) -> None:
    """Two epochs of 40 images in batches of 10, a second each."""
    progress = Progress("task 1/2", 2, 40, stream)
    for epoch in range(2):
        for _ in range(4):
            clock.now += 1
            progress.advance(epoch, 10)
        progress.epoch(epoch, {"ce": 0.5, "kd": 0.25})


def test_a_log_gets_one_line_per_epoch(clock: SimpleNamespace):
    stream = io.StringIO()
    run_epochs(stream, clock)
    assert stream.getvalue() == (
        "task 1/2 · epoch 1/2 · ce 0.5000 · kd 0.2500 · 10 images/s · 4 s left\n"
        "task 1/2 · epoch 2/2 · ce 0.5000 · kd 0.2500 · 10 images/s · 0 s left\n"
    )


def test_a_terminal_line_is_rewritten_in_place(clock: SimpleNamespace):
    stream = Terminal()
    run_epochs(stream, clock)
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    assert lines[2] == ""
    for line in lines[:2]:
        writes = line.split("\r\x1b[K")
        assert writes[0] == ""
        assert len(writes) == 1 + 4 + 1  # every second, then the whole epoch
        assert "ce 0.5000" in writes[-1]


def test_the_time_left_falls_steadily(clock: SimpleNamespace):
    stream = Terminal()
    run_epochs(stream, clock)
    writes = stream.getvalue().replace("\n", "").split("\r\x1b[K")[1:]
    left = [int(write.rsplit("· ", 1)[1].split()[0]) for write in writes]
    assert left == [7, 6, 5, 4, 4, 3, 2, 1, 0, 0]


def test_a_terminal_is_not_flooded(clock: SimpleNamespace):
    stream = Terminal()
    progress = Progress("task", 1, 1000, stream)
    for _ in range(100):
        clock.now += 0.01
        progress.advance(0, 1)
    assert 3 <= stream.getvalue().count("\r") <= 5


def test_training_reports_each_epoch_to_a_log(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.trainer(settings(LINEAR)).run()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[:2] for line in lines] == [["task", "epoch 1/2"], ["task", "epoch 2/2"]]
    assert all(" · ce " in line for line in lines)


# Serving


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory, tasks: tuple[Task, ...]) -> Predictor:
    return Predictor(saved_model(tmp_path_factory.mktemp("served") / "model", settings(), tasks[0]))


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory, picture: Image.Image) -> Path:
    path = tmp_path_factory.mktemp("images") / "picture.png"
    picture.save(path)
    return path


FORMS: dict[str, Callable[[Path], object]] = {
    "path": lambda path: path,
    "text path": str,
    "bytes": lambda path: path.read_bytes(),
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "base64": lambda path: base64.b64encode(path.read_bytes()).decode(),
    "pillow": Image.open,
    "array": lambda path: np.asarray(Image.open(path)),
}


@pytest.fixture(scope="module")
def expected(predictor: Predictor, picture: Image.Image) -> np.ndarray:
    resized = picture.resize((32, 32), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).unsqueeze(0)
    with torch.no_grad():
        return predictor.network(pixels).sigmoid().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_gives_the_same_confidences(
    predictor: Predictor, png: Path, expected: np.ndarray, form: str
):
    np.testing.assert_allclose(predictor.confidences([FORMS[form](png)]), expected, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_data_frame_and_a_single_image_are_predicted_too(
    predictor: Predictor, png: Path, expected: np.ndarray, form: str
):
    frame = pd.DataFrame({"image": [FORMS[form](png), FORMS[form](png)]})
    two = predictor.predict(frame)
    assert list(two.columns) == list(predictor.card.classes)
    np.testing.assert_allclose(two.to_numpy(), np.concatenate([expected] * 2), rtol=1e-5)
    one = predictor.predict(FORMS[form](png))
    assert one.shape == expected.shape
    np.testing.assert_allclose(one.to_numpy(), expected, rtol=1e-5)


def test_a_grey_or_transparent_image_is_read_as_rgb(predictor: Predictor, picture: Image.Image):
    for mode in ("L", "RGBA", "P"):
        other = picture.convert(mode)
        np.testing.assert_allclose(
            predictor.confidences([other]), predictor.confidences([other.convert("RGB")]), rtol=1e-5
        )


def test_many_images_keep_their_order(predictor: Predictor, picture: Image.Image, expected: np.ndarray):
    dark = Image.new("RGB", (32, 32))
    values = predictor.confidences([dark] * 33 + [picture])
    assert values.shape == (34, NEW)
    np.testing.assert_allclose(values[33:], expected, rtol=1e-4)
    assert not np.allclose(values[0], expected[0], rtol=1e-3)


def test_no_images_give_no_rows(predictor: Predictor):
    assert predictor.confidences([]).shape == (0, NEW)


BAD_IMAGES = {
    "garbage bytes": lambda png: b"not an image",
    "no bytes": lambda png: b"",
    "truncated bytes": lambda png: png.read_bytes()[:500],
    "missing file": lambda png: png.with_name("nowhere.png"),
    "text file": lambda png: Path(__file__),
    "not base64": lambda png: "!!!",
    "base64 of something else": lambda png: base64.b64encode(b"x" * 900).decode(),
    "truncated pillow": lambda png: Image.open(io.BytesIO(png.read_bytes()[:500])),
    "array of fractions": lambda png: np.zeros((8, 8, 3)),
    "array of one axis": lambda png: np.zeros(8, np.uint8),
    "nothing": lambda png: None,
    "a number": lambda png: 5.0,
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_is_refused_in_one_line(predictor: Predictor, png: Path, case: str):
    with pytest.raises(BadData) as error:
        predictor.confidences([BAD_IMAGES[case](png)])
    assert one_line(error)
    assert len(str(error.value)) < 400


def test_above_lists_names_over_the_threshold_most_confident_first():
    assert above([0.2, 0.9, 0.8, 0.81], ["a", "b", "c", "d"], 0.8) == [("b", 0.9), ("d", 0.81)]
