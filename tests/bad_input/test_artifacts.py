"""Files that a step hands to a later one, tampered with: each gives the one line of its recipe in `artifacts.yaml`."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csc.artifacts import Metrics, RegisteredTask, Split, Training
from csc.data.scores import Scores
from csc.data.views import View
from csc.errors import CscError
from csc.model import load_network, read_card
from csc.replay.memory import Memory
from csc.scenario import Scenario
from csc.storage.tensors import load_tensors
from csc.training.checkpoint import Checkpoint, ResumePoint, _digest
from tests.bad_input.recipes import check_line, follow, parameters, recipes
from tests.trained import DIGITS, trained, write_registered
from tests.unit.training.bench import SCENARIO, saved_model, settings

RECIPES = recipes("artifacts")
CONFIG = settings("head=linear")
SPLIT = Split("digits-b0c5", 1, 2, DIGITS[:5], DIGITS[:5])
Read = Callable[[Path], object]


def keeper(path: Path) -> Checkpoint:
    """A checkpoint of something small."""
    network = torch.nn.Linear(3, 2)
    scaler = torch.amp.GradScaler(enabled=False)
    return Checkpoint(path, "this run and task", network, torch.optim.AdamW(network.parameters()), None, scaler)


def _restore(folder: Path) -> object:
    position = keeper(folder / "checkpoint").restore()
    assert position.log, "not resumed"
    return position


def _checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    made = keeper(folder / "checkpoint")
    made.network(torch.ones(3)).sum().backward()
    made.optimizer.step()
    made.save(ResumePoint([{"loss": 1.0}]))


def _signed_again(folder: Path) -> None:
    """Give a checkpoint that was changed the digest of what it is now."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    file = folder / "checkpoint"
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata()["csc"]
    tensors = load_file(file)
    save_file(tensors, file, {"csc": text, "sha256": _digest(text, tensors)})


def _model(folder: Path) -> None:
    folder.rmdir()
    saved_model(folder, CONFIG, Scenario.parse(SCENARIO).task(DIGITS, 1))


def _card(folder: Path) -> None:
    shutil.copy(trained(folder / "made", 2).folder / "model" / "model.json", folder)


def _step(name: str, folder: Path) -> None:
    shutil.copy(trained(folder / "made", 1).folder / name, folder)


def _unsigned(make: Callable[[Path], object], folder: Path) -> None:
    """Make a JSON file and take its digest out, as whoever tampers with it can."""
    make(folder)
    for file in folder.glob("*.json"):
        content = json.loads(file.read_text())
        del content["sha256"]
        file.write_text(json.dumps(content, indent=1))


def _scores(folder: Path) -> None:
    _step("test.parquet", folder)
    view = View.read(folder / "test.parquet")
    even = np.full((len(view), len(view.classes)), 0.5, np.float32)
    Scores(even, view.targets(), view.classes, view.table["image_id"]).write(folder / "scores.parquet")


def _memory(folder: Path) -> None:
    Memory.empty("d" * 64).write(folder / "memory.parquet")


# What is made in a folder, and how it is read.
GIVEN: dict[str, tuple[Callable[[Path], object], Read]] = {
    "split": (
        functools.partial(_unsigned, lambda folder: SPLIT.write(folder / "split.json")),
        lambda folder: Split.read(folder / "split.json"),
    ),
    "metrics": (
        functools.partial(_unsigned, functools.partial(_step, "metrics.json")),
        lambda folder: Metrics.read(folder / "metrics.json"),
    ),
    "training": (
        functools.partial(_unsigned, functools.partial(_step, "model/training.json")),
        lambda folder: Training.read(folder / "training.json"),
    ),
    "registered": (
        functools.partial(_unsigned, lambda folder: write_registered(folder / "registered.json", "f" * 64)),
        lambda folder: RegisteredTask.read(folder / "registered.json"),
    ),
    "card": (_card, read_card),
    "model": (_model, load_network),
    "tensors": (_checkpoint, lambda folder: load_tensors(folder / "checkpoint")),
    "scores": (_scores, lambda folder: Scores.read(folder / "scores.parquet")),
    "memory": (_memory, lambda folder: Memory.read(folder / "memory.parquet")),
    "checkpoint": (_checkpoint, _restore),
    "signed checkpoint": (_checkpoint, lambda folder: (_signed_again(folder), _restore(folder))),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A valid artifact of each kind, made once."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("made")
        GIVEN[kind][0](folder)
        return folder

    return make


@pytest.mark.parametrize("recipe", parameters(RECIPES))
def test_a_tampered_artifact_gives_the_one_line_of_its_recipe(
    recipe: dict[str, Any], made: Callable[[str], Path], tmp_path: Path
):
    folder = tmp_path / "raw"
    shutil.copytree(made(recipe["given"]), folder)
    follow(recipe, folder)
    with pytest.raises(CscError) as caught:
        GIVEN[recipe["given"]][1](folder)
    check_line(recipe, str(caught.value).replace(str(folder), "{raw}"))


@pytest.mark.parametrize("kind", GIVEN)
def test_what_nobody_changed_is_read(kind: str, made: Callable[[str], Path]):
    GIVEN[kind][1](made(kind))


def test_there_are_recipes_of_every_artifact():
    assert {recipe["given"] for recipe in RECIPES} == set(GIVEN)
