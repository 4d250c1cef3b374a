"""The outputs of a task's steps without the steps: what register is given, made in a moment."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csc.config import resolve
from csc.model import ModelCard
from csc.report.run import Run, TaskResult
from csc.scenario import Scenario
from csc.steps.register import TRACKED, register
from csc.storage import write_json
from csc.tracking.runs import Registered, Tracker

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
    numbers = dict.fromkeys((*TRACKED, "images", "threshold"), 0.0) | {"AP": {"0": 0.0}, "confidence": {}}
    run = Run(SCENARIO, "csc", 0, "scratch", "d" * 64, "1.0", (TaskResult(1, ("0",), ("0",), numbers, 10, 1.5),))
    model = Registered(f"{SCENARIO}-csc", "1", "m-1", fingerprint, "r-1", "r-0", location)
    write_json(file, {"model": asdict(model), "run": run.to_json()})
    return str(file)


def epoch_log(epoch: int) -> dict[str, float]:
    """What an epoch (from 0) came to."""
    return {"loss": 1.0 / (epoch + 1), "ce": 0.5 / (epoch + 1)}


def trained(folder: Path, task: int, seed: int = 0) -> Trained:
    """A finished task of a scenario with three tasks."""
    cut = Scenario.parse(SCENARIO).tasks(DIGITS)[task - 1]
    config = json.loads(resolve("digits", {"seed": seed, "train": {"epochs": EPOCHS}}).to_json())
    card = ModelCard(
        method="csc",
        scenario=SCENARIO,
        task=task,
        tasks=cut.total,
        classes=cut.seen,
        new=cut.new,
        config=config,
        initialisation={"text": "scratch"},
        mean=(0.5,),
        std=(0.5,),
        data_fingerprint="d" * 64,
        prior_fingerprint="" if task == 1 else "p" * 64,
        code_version="1.0",
    )
    place = folder / f"task-{task}-seed-{seed}"
    model = place / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(f"weights of task {task}, seed {seed}".encode())
    (model / "model.json").write_text(json.dumps(asdict(card)))
    log = {
        "view": "train.parquet",
        "images": 10 * task,
        "seconds": 1.5,
        "epochs": [epoch_log(e) for e in range(EPOCHS)],
    }
    (model / "training.json").write_text(json.dumps(log))
    numbers = {name: 10.0 * task + place_of for place_of, name in enumerate(TRACKED)}
    more = {"AP": {name: 50.0 for name in cut.seen}, "images": 20, "threshold": 0.5, "confidence": {}}
    (place / "metrics.json").write_text(json.dumps(numbers | more))
    return Trained(card, place)
