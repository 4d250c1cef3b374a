"""The outputs of a task's steps without the steps: what register is given, made in a moment."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from csc.artifacts import Metrics, RegisteredTask, RegisteredVersion, RunResults, TaskResult, Training
from csc.config import resolve
from csc.data.views import View
from csc.model import ModelCard
from csc.scenario import Scenario
from csc.steps.register import TRACKED, register
from csc.tracking.runs import Tracker

SCENARIO = "digits-b0c4"
DIGITS = tuple("0123456789")
EPOCHS = 2


@dataclass(frozen=True)
class Trained:
    """A task that is trained and evaluated: a model folder, its metrics, its test view."""

    card: ModelCard
    folder: Path

    @property
    def registered(self) -> Path:
        return self.folder / "registered.json"

    def train(self) -> None:
        """What the train step tells the tracking server."""
        tracker = Tracker(self.card)
        tracker.log_inputs({"train": ("train.parquet", 10)}, None)
        for epoch in range(EPOCHS):
            tracker.log_epoch(epoch, epoch_log(epoch))

    def register(self, prior: "Trained | None" = None) -> dict[str, Any]:
        """Run the step; return what it wrote."""
        before = str(prior.registered) if prior else ""
        inputs = [str(self.folder / name) for name in ("model", "metrics.json", "test.parquet", "registered.json")]
        register(*inputs, before)
        return json.loads(self.registered.read_text())


def write_registered(file: Path, fingerprint: str, location: str = "") -> str:
    """Write the record of a registered base task, without a tracking server; return its path."""
    record(RegisteredVersion(f"{SCENARIO}-csc", "1", "m-1", fingerprint, "r-1", "r-0", location)).write(file)
    return str(file)


def record(model: RegisteredVersion) -> RegisteredTask:
    """What is recorded of a registered base task."""
    result = TaskResult(1, ("0",), ("0",), metrics(("0",)), 10, 1.5)
    return RegisteredTask(model, RunResults(SCENARIO, "csc", 0, "scratch", "d" * 64, "1.0", (result,)))


def metrics(classes: tuple[str, ...], first: float = 0.0) -> Metrics:
    """The metrics of a task: those that are tracked count up from the first."""
    tracked = {name: first + index for index, name in enumerate(TRACKED)}
    ap = dict.fromkeys(classes, 50.0)
    bins = {"edges": [0.0, 0.5, 1.0], "positives": [1, 9], "negatives": [9, 1]}
    return Metrics(**tracked, images=20, threshold=0.5, AP=ap, best_AP=ap, confidence=bins)


def epoch_log(epoch: int) -> dict[str, float]:
    """What an epoch (from 0) came to."""
    return {"loss": 1.0 / (epoch + 1), "ce": 0.5 / (epoch + 1), "H": -0.1, "images_per_second": 9.0}


_ONE_IMAGE = pa.table(
    {
        "image_id": ["a"],
        "shard": pa.array([0], pa.int32()),
        "row": pa.array([0], pa.int32()),
        "labels": pa.array([[0]], pa.list_(pa.int16())),
    }
)


def trained(
    folder: Path,
    task: int,
    seed: int = 0,
    classes: tuple[str, ...] = DIGITS,
    register: dict[str, float] | None = None,
    mean_ap: float | None = None,
    note: str = "",
    settings: dict[str, Any] | None = None,
) -> Trained:
    """A finished task of a scenario with three tasks, with limits for `register` and a mAP of ten times its number."""
    cut = Scenario.parse(SCENARIO).tasks(classes)[task - 1]
    chosen = {"seed": seed, "train": {"epochs": EPOCHS}, "register": register or {}, **(settings or {})}
    config = json.loads(resolve("digits", chosen).to_json())
    card = ModelCard(
        method="csc",
        scenario=SCENARIO,
        task=task,
        tasks=cut.total,
        classes=cut.seen,
        new=cut.new,
        config=config,
        initialisation={"text": "scratch"},
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        data_fingerprint="d" * 64,
        prior_fingerprint="" if task == 1 else "p" * 64,
        code_version="1.0",
    )
    task_folder = folder / f"task-{task}-seed-{seed}"
    model = task_folder / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(f"weights of task {task}, seed {seed}".encode())
    (model / "model.json").write_text(json.dumps(asdict(card)))
    Training("train.parquet", 10 * task, 1.5, {}, [epoch_log(e) for e in range(EPOCHS)]).write(model / "training.json")
    metrics(cut.seen, 10.0 * task if mean_ap is None else mean_ap).write(task_folder / "metrics.json")
    View(_ONE_IMAGE, cut.seen, "images", "d" * 64, note).write(task_folder / "test.parquet")
    return Trained(card, task_folder)
