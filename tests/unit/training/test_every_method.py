"""Every method of the registry learns two small tasks of digits through the steps, from its artifact alone."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from csc.config import base_method, methods, parse_overrides, resolve
from csc.data.ingest.digits import ingest_digits
from csc.methods import registered
from csc.model import MEMORY, METHOD_STATE, load_network
from csc.replay.memory import Memory
from csc.steps.build_dataset import build_dataset
from csc.steps.evaluate import evaluate
from csc.steps.ingest import ingest
from csc.steps.register import register
from csc.steps.split_labels import split_labels
from csc.steps.train import train
from csc.storage.tensors import load_tensors
from tests.tracked import fresh_database
from tests.unit.training.bench import TINY

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("every method")]
SCENARIO, TASKS = "digits-b0c5", 2
MEASURED = {"loss", "images_per_second", "waiting"}
TERMS = {  # what the loss of a second task consists of, besides the classification loss and max-entropy
    "agcn": {"kd", "relations"},
    "agcn-r": {"kd", "relations"},
    "csc": {"kd"},
    "csc-r": {"kd", "replay"},
    "derpp": {"logits", "replay"},
    "krt": {"tokens"},
    "krt-r": {"tokens"},
    "l2p": {"pull"},
    "lwf": {"kd"},
    "ocdm": {"replay"},
    "oewc": {"ewc"},
    "podnet": {"spatial", "flat"},
    "prs": {"replay"},
}
SOLVE = ("ridge", "l3a")  # instead of descending
STILL = {  # parameters that the second task must leave as the first made them
    "krt": ("head.tokens.0", "head.heads.0"),
    "krt-r": ("head.tokens.0", "head.heads.0"),
    "l2p": ("backbone.net.",),
}
TINIER = ("train.epochs=1", "train.batch_size=16", "krt.width=16", "krt.heads=2", "oewc.samples=16", "agcn.width=8")


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> str:
    data = ingest_digits(tmp_path_factory.mktemp("data") / "digits", train=60, test=24, size=32).path
    return ingest(SCENARIO, str(data)).to_json()


def config_of(method: str, *more: str) -> str:
    backbone = ("backbone.name=test_vit",) if method == "l2p" else TINY[:2]
    shared = parse_overrides([*backbone, *TINY[2:], *TINIER])
    return resolve("digits", parse_overrides([f"method={method}", *more]), shared).to_json()


def run_task(origin: str, config: str, task: int, folder: Path, prior: Path | None) -> Path:
    """The five steps of a task; returns the folder with everything they wrote."""
    task_folder = folder / f"task-{task}"
    task_folder.mkdir(parents=True)
    of = {
        name: str(task_folder / name) for name in ("split", "train", "test", "model", "scores", "metrics", "registered")
    }
    before = str(prior / "registered") if prior else ""
    split_labels(origin, SCENARIO, task, TASKS, of["split"])
    build_dataset(origin, of["split"], config, of["train"], of["test"])
    train(config, of["split"], of["train"], of["model"], before)
    evaluate(of["model"], of["test"], of["scores"], of["metrics"], before)
    register(of["model"], of["metrics"], of["test"], of["registered"], before)
    return task_folder


@pytest.fixture(scope="module")
def learned(origin: str, tmp_path_factory) -> Iterator[Callable[[str], tuple[str, Path, Path]]]:
    """The settings of a method and the folders of its two tasks, which are run when they are first asked for."""
    folder = tmp_path_factory.mktemp("methods")

    @cache
    def two_tasks(method: str) -> tuple[str, Path, Path]:
        config = config_of(method) if method in SOLVE else config_of(method, "max_entropy.beta=0.01")
        first = run_task(origin, config, 1, folder / method, None)
        return config, first, run_task(origin, config, 2, folder / method, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", fresh_database(folder))
        yield two_tasks


@pytest.mark.parametrize("method", sorted(methods()))
def test_a_method_learns_two_tasks_from_its_artifact(learned: Callable[[str], tuple[str, Path, Path]], method: str):
    config, first, second = learned(method)
    solves = method in SOLVE
    settings, kind = resolve("digits", json.loads(config)), registered()[base_method(method)]
    log = json.loads((second / "model" / "training.json").read_text())["epochs"][-1]
    assert log.keys() - MEASURED == ({"squared_error"} if solves else {"ce", "H"} | TERMS.get(method, set()))
    network, card = load_network(second / "model")
    before, still = load_network(first / "model")[0].state_dict(), STILL.get(method, ())
    held = [name for name in before if name.startswith(still)] if still else []
    assert bool(held) == bool(still)
    assert all(torch.equal(network.state_dict()[name], before[name]) for name in held)
    assert len(card.classes) == 10
    metrics = json.loads((second / "metrics").read_text())
    assert 0 <= metrics["mAP"] <= 100
    remembers = settings.memory.sampler != "none"
    assert (second / "model" / MEMORY).is_file() == remembers
    if remembers:
        memory = Memory.read(second / "model" / MEMORY)
        limit = settings.memory.total or settings.memory.per_class * 10
        assert 0 < len(memory) <= limit
        assert (memory.stored > 0).all() == kind.stores_logits
    assert all(value.isfinite().all() for value in network.state_dict().values())


@pytest.mark.parametrize("method", ["csc", "derpp", "krt-r", "oewc"])
def test_the_second_task_is_repeatable_from_the_registered_model(
    learned: Callable[[str], tuple[str, Path, Path]], origin: str, tmp_path: Path, method: str
):
    config, first, one = learned(method)
    two = run_task(origin, config, 2, tmp_path, first)
    weights, again = (load_network(folder / "model")[0].state_dict() for folder in (one, two))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    kept, kept_again = (load_tensors(folder / "model" / METHOD_STATE) for folder in (one, two))
    assert kept.keys() == kept_again.keys()
    assert all(torch.equal(kept[name], kept_again[name]) for name in kept)
    if method in ("derpp", "krt-r"):
        bytes_of = [(folder / "model" / MEMORY).read_bytes() for folder in (one, two)]
        assert bytes_of[0] == bytes_of[1]
