"""A task that is killed and taken up again."""

import json
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
from csc.model import fingerprint
from csc.steps.build_dataset import build_dataset
from csc.steps.ingest import ingest
from csc.steps.split_labels import split_labels
from csc.steps.train import train
from csc.training.loop import EpochLog, Trainer
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


@pytest.fixture
def learnt(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], Path]:
    """Runs the train step of a task, with checkpoints in a folder that outlives it; returns the model folder."""
    monkeypatch.setattr("csc.steps.train.Tracker", MagicMock())
    config = settings(LINEAR, "train.epochs=1").to_json()
    origin = ingest(SCENARIO, str(dataset.path)).to_json()

    def step(task: int, prior: str = "") -> Path:
        place = tmp_path / f"task-{task}"
        split, train_view, test_view = (str(place / name) for name in ("split.json", "train.parquet", "test.parquet"))
        model = place / "data" / "model"  # as the registry keeps it
        split_labels(origin, SCENARIO, task, 2, split)
        build_dataset(origin, split, config, train_view, test_view)
        train(config, split, train_view, str(model), prior, str(tmp_path / "kept"))
        return model

    return step


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
