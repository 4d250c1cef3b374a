"""A task that is killed and taken up again."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from csc.data.dataset import Dataset
from csc.errors import BadModel
from csc.model import fingerprint
from csc.steps.build_dataset import build_dataset
from csc.steps.ingest import ingest
from csc.steps.split_labels import split_labels
from csc.steps.train import train
from csc.training.checkpoint import Checkpoint, EpochLog, ResumePoint
from csc.training.loop import Trainer
from tests.trained import write_registered
from tests.unit.training.bench import (
    LINEAR,
    SCENARIO,
    Bench,
    changed,
    fresh_network,
    settings,
    state_of,
    truncate,
    without_speed,
)


class Killed(Exception):
    """The node went away."""


def die_after(last: int) -> Callable[[int, EpochLog], None]:
    def on_epoch(epoch: int, log: EpochLog) -> None:
        if epoch == last:
            raise Killed

    return on_epoch


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


RESUMED = [
    ("train.schedule=onecycle",),
    ("train.schedule=constant",),
    ("train.schedule=onecycle", "input.augment=true"),
    ("train.schedule=constant", "train.channels_last=on"),
]


@pytest.mark.parametrize("items", RESUMED, ids="+".join)
def test_a_run_killed_between_epochs_ends_as_if_nothing_had_happened(bench: Bench, items: tuple[str, ...]):
    config = settings("train.epochs=3", *items)
    undisturbed = bench.second(config, checkpoint_file=bench.folder / "other.safetensors")
    expected = undisturbed.run()
    with pytest.raises(Killed):
        bench.second(config, on_epoch=die_after(0)).run()
    reported: list[int] = []
    resumed = bench.second(config, seed=99, on_epoch=lambda epoch, log: reported.append(epoch))
    torch.manual_seed(99)  # neither these weights nor this random state may matter any more
    log = resumed.run()
    assert reported == [1, 2]
    assert without_speed(log) == without_speed(expected)
    assert changed(state_of(undisturbed.network), resumed.network) == set()


def test_a_resumed_network_with_dropout_draws_what_it_would_have_drawn(bench: Bench):
    def trainer(**more) -> Trainer:
        config = settings(LINEAR, "train.epochs=2")
        network = fresh_network(config)
        network.head = nn.Sequential(nn.Dropout(0.5), network.head)
        return bench.trainer(config, network, **more)

    undisturbed = trainer(checkpoint_file=bench.folder / "other.safetensors")
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
    reported: list[int] = []
    bench.trainer(settings("train.epochs=1", change), on_epoch=lambda epoch, log: reported.append(epoch)).run()
    assert reported == [0]


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(4096)),
    "without facts": lambda path: save_file(load_file(path), path),
    "facts not JSON": lambda path: save_file(load_file(path), path, metadata={"csc": "{"}),
    "other weights": lambda path: flip(path, 8 * path.stat().st_size // 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_task_starts_again(
    bench: Bench, damage: str, capsys: pytest.CaptureFixture[str]
):
    config = settings(LINEAR, "train.epochs=2")
    undisturbed = bench.trainer(config, checkpoint_file=bench.folder / "other.safetensors")
    undisturbed.run()
    with pytest.raises(Killed):
        bench.trainer(config, on_epoch=die_after(0)).run()
    DAMAGES[damage](bench.checkpoint)
    reported: list[int] = []
    again = bench.trainer(config, on_epoch=lambda epoch, log: reported.append(epoch))
    capsys.readouterr()
    again.run()
    assert reported == [0, 1]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert line.startswith(f"task starts again: {bench.checkpoint}: damaged checkpoint (")
    assert changed(state_of(undisturbed.network), again.network) == set()


def test_no_flipped_bit_of_a_checkpoint_goes_unnoticed(tmp_path: Path):
    network = nn.Linear(3, 2)
    moving = network, torch.optim.Adam(network.parameters()), None, torch.amp.GradScaler("cpu", enabled=False)
    network(torch.ones(1, 3)).sum().backward()
    moving[1].step()
    keeper = Checkpoint(tmp_path / "checkpoint", "key", *moving)
    keeper.save(ResumePoint([{"loss": 1.0}], 2, {"ce": torch.tensor(0.5)}))
    whole = keeper.path.read_bytes()
    header = 8 * (8 + int.from_bytes(whole[:8], "little"))
    random = np.random.default_rng(0)
    flips = [*random.integers(0, header, 150).tolist(), *random.integers(header, 8 * len(whole), 50).tolist()]
    accepted = 0
    before = state_of(network)
    for bit in flips:
        keeper.path.write_bytes(whole)
        flip(keeper.path, bit)
        with contextlib.suppress(BadModel):
            position = keeper.restore()
            accepted += 1
            assert position == ResumePoint() or (position.log, position.updates) == ([{"loss": 1.0}], 2)
            assert changed(before, network) == set()
    assert accepted <= 1  # spaces at the end of the header say nothing


def stop_at(trainer: Trainer, update: int) -> None:
    """Have the process get SIGTERM in the middle of an update (from 1)."""
    updates = iter(range(1, 1_000))

    def send(*_: object) -> None:
        if next(updates) == update:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.optimizer.register_step_pre_hook(send)


STOPPED_IN = [
    ("train.schedule=onecycle",),
    ("method=lwf", "input.augment=true", "train.accumulate=2"),
    ("method=finetune", "train.amp=fp16", "train.clip=1", "train.schedule=constant"),
]


@pytest.mark.slow
@pytest.mark.parametrize("items", STOPPED_IN, ids="+".join)
def test_a_run_that_is_asked_to_stop_within_an_epoch_ends_as_if_nothing_had_happened(
    bench: Bench, items: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    config = settings("train.epochs=2", *items)
    undisturbed = bench.second(config, checkpoint_file=bench.folder / "other.safetensors")
    expected = undisturbed.run()
    handler = signal.getsignal(signal.SIGTERM)
    for update in range(1, 2 * undisturbed.updates_per_epoch):
        bench.checkpoint.unlink(missing_ok=True)
        for later in (update, 1):  # the second stop is in what was resumed
            stopped = bench.second(config)
            stop_at(stopped, later)
            with pytest.raises(SystemExit) as exit:
                stopped.run()
            assert exit.value.code == 143
        assert "asked to stop · saved after update " in capsys.readouterr().out
        resumed = bench.second(config, seed=99)
        torch.manual_seed(99)
        assert without_speed(resumed.run()) == without_speed(expected)
        assert changed(state_of(undisturbed.network), resumed.network) == set()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_checkpoint_is_safetensors_without_a_pickle_and_leaves_nothing_next_to_it(bench: Bench):
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


@pytest.fixture
def learnt(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], Path]:
    """Runs the train step of a task, with checkpoints in a folder that outlives it; returns the model folder."""
    monkeypatch.setattr("csc.steps.train.Tracker", MagicMock())
    config = settings(LINEAR, "train.epochs=1").to_json()
    origin = ingest(SCENARIO, str(dataset.path)).to_json()

    def step(task: int, prior: str = "") -> Path:
        task_folder = tmp_path / f"task-{task}"
        split, train_view, test_view = (
            str(task_folder / name) for name in ("split.json", "train.parquet", "test.parquet")
        )
        model = task_folder / "data" / "model"  # as the registry keeps it
        split_labels(origin, SCENARIO, task, 2, split)
        build_dataset(origin, split, config, train_view, test_view)
        train(config, split, train_view, str(model), prior, str(tmp_path / "kept"))
        return model

    return step


@pytest.mark.slow
def test_a_task_removes_the_checkpoint_of_the_task_before_and_none_of_another_run(
    learnt: Callable[..., Path], tmp_path: Path
):
    kept = tmp_path / "kept"
    other = kept / "another-run" / "task-01.safetensors"
    other.parent.mkdir(parents=True)
    other.touch()

    def checkpoints() -> list[str]:
        return sorted(path.name for path in kept.rglob("*") if path.is_file() and path != other)

    model = learnt(1)
    assert checkpoints() == ["task-01.safetensors"]  # not evaluated yet: the step may be tried again
    weights = (model / "model.safetensors").read_bytes()
    learnt(2, prior=write_registered(tmp_path / "registered.json", fingerprint(model), str(model.parents[1])))
    assert checkpoints() == ["task-02.safetensors"]
    assert (learnt(1) / "model.safetensors").read_bytes() == weights  # tried again after all, it is trained again
    assert other.is_file()


@pytest.mark.parametrize("harm", ["other bytes", "another model"])
def test_a_registered_model_that_has_changed_is_never_continued(
    learnt: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
):
    model = learnt(1)
    registered = fingerprint(model) if harm == "other bytes" else "0" * 64
    if harm == "other bytes":
        flip(model / "model.safetensors", 8 * (model / "model.safetensors").stat().st_size - 100)
    monkeypatch.setattr("csc.steps.train.fetch_model", lambda uri, folder: model)  # whatever the registry has
    expected = r"model\.safetensors: not the file" if harm == "other bytes" else "not the model that was registered"
    with pytest.raises(BadModel, match=expected):
        learnt(2, prior=write_registered(tmp_path / "registered.json", registered, str(model.parents[1])))
