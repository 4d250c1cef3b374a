"""All steps that do not train, at the size of COCO: 80 classes in 16 tasks, 122,920 labelled images.

Labels and scores are drawn at random; weights are a few bytes. MLflow is a database in a folder. Everything runs in a
process of its own, whose peak of memory is counted.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks import Result
from csc import metrics
from csc.artifacts import Metrics, Origin, RegisteredTask, Training
from csc.config import resolve
from csc.data.dataset import Dataset, card_digest
from csc.data.ingest.coco import COCO_CLASSES
from csc.data.ingest.images import ListedImage
from csc.data.ingest.writer import label_table
from csc.data.scores import Scores
from csc.data.views import View
from csc.model import ModelCard
from csc.scenario import Scenario, Task
from csc.storage import sha256_file, write_json

__all__ = ["make_labels", "make_model", "run_steps", "steps"]

SCENARIO = "coco-b0c5"
TRAIN_IMAGES, TEST_IMAGES, LABELS = 82_783, 40_137, 3  # labels of an image
EPOCHS = 20


def steps() -> list[Result]:
    """Seconds of each step, the mean over the tasks, and the memory of the largest."""
    with tempfile.TemporaryDirectory(prefix="csc-bench-") as folder:
        code = f"from benchmarks.steps import measure; measure({folder!r})"
        environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    tasks = len(Scenario.parse(SCENARIO).tasks(COCO_CLASSES))
    results = [
        Result("steps", f"{step}, a task of {SCENARIO}", seconds / (tasks if step != "report" else 1), None,
               "one second", "lower")
        for step, seconds in measured["seconds"].items()
    ]  # fmt: skip
    whole = f"all of {tasks} tasks"
    return [
        *results,
        Result("steps", whole, sum(measured["seconds"].values()) / tasks, None, "one second a task", "lower"),
        Result("steps", f"peak of memory, {whole}", measured["peak"] / 1e9, None, "1 GB", "lower"),
    ]


def measure(name: str) -> None:
    """Do it all in a folder, and print what it took as JSON."""
    dataset = make_labels(Path(name) / "set", TRAIN_IMAGES, TEST_IMAGES)
    print(json.dumps({"seconds": run_steps(Path(name), SCENARIO, dataset), "peak": _peak()}))


def run_steps(root: Path, scenario: str, dataset: Dataset, seed: int = 0) -> dict[str, float]:
    """Run all steps but training for all tasks of a scenario; return the seconds that each step took."""
    from csc.steps.build_dataset import build_dataset
    from csc.steps.register import register
    from csc.steps.report import report
    from csc.steps.split_labels import split_labels

    origin = Origin(dataset.uri, dataset.fingerprint, "bench").to_json()
    seconds: dict[str, float] = defaultdict(float)

    def timed(step: str, work: Callable[..., object], *given: object) -> None:
        started = time.perf_counter()
        work(*given)
        seconds[step] += time.perf_counter() - started

    before = ""
    for task in Scenario.parse(scenario).tasks(dataset.classes):
        folder = root / f"task-{task.index}"
        files = ("split.json", "train.parquet", "test.parquet", "metrics.json", "scores.parquet", "registered.json")
        split, train, test, numbers, scores, record = (str(folder / file) for file in files)
        card = make_model(folder / "model", scenario, task, dataset.fingerprint, seed)
        config = json.dumps(card.config)
        timed("split_labels", split_labels, origin, scenario, task.index, task.total, split)
        timed("build_dataset", build_dataset, origin, split, config, train, test)
        timed("evaluate, without the network", _evaluate, test, scores, numbers, before)
        timed("register", register, str(folder / "model"), numbers, test, record, before, "", scores)
        before = record
    timed("report", report, before, str(root / "page.html"), str(root / "table.md"))
    return seconds


def make_labels(folder: Path, train: int, test: int) -> Dataset:
    """A data set without images: nothing here opens one."""
    rng = np.random.default_rng(0)
    listing = []
    for split, images in (("train", train), ("test", test)):
        for row, drawn in enumerate(rng.integers(0, len(COCO_CLASSES), (images, LABELS)).tolist()):
            labels = tuple(sorted({COCO_CLASSES[index] for index in drawn}))
            listing.append(ListedImage(f"{split}-{row:012d}", split, labels, (), ""))
    folder.mkdir()
    pq.write_table(label_table(tuple(listing)), folder / "labels.parquet")
    info = {
        "name": "coco",
        "classes": sorted(COCO_CLASSES),
        "splits": {"train": {"images": train}, "test": {"images": test}},
        "fingerprint": "d" * 64,
        "source": {},
        "difficult_is_member": True,
        "labels_sha256": sha256_file(folder / "labels.parquet"),
    }
    write_json(folder / "dataset.json", info | {"digest": card_digest(info)})
    return Dataset.open(folder)


def _evaluate(test: str, scores_out: str, metrics_out: str, prior: str) -> None:
    """What the evaluate step does around the network: scores are drawn, a little higher where they should be."""
    view = View.read(test)
    rng = np.random.default_rng(1)
    made = (rng.random((len(view), len(view.classes)), np.float32) + view.targets()) / 2
    Scores(made.astype(np.float32), view.targets(), view.classes, view.table["image_id"]).write(scores_out)
    scores = Scores.read(scores_out)
    best = RegisteredTask.read(prior).run.last.metrics.best_AP if prior else {}
    Metrics(**metrics.evaluate(scores.confidences, scores.targets, view.classes, 0.5, best)).write(metrics_out)


def make_model(folder: Path, scenario: str, task: Task, fingerprint: str, seed: int) -> ModelCard:
    """Write a model folder as the train step leaves it, with weights that are none; return its card."""
    folder.mkdir(parents=True)
    config = json.loads(resolve("coco", {"seed": seed, "train": {"epochs": EPOCHS}}).to_json())
    card = ModelCard(
        method="csc", scenario=scenario, task=task.index, tasks=task.total, classes=task.seen, new=task.new,
        config=config, initialisation={"text": "scratch"}, mean=(0.5,) * 3, std=(0.5,) * 3,
        data_fingerprint=fingerprint, prior_fingerprint="" if task.index == 1 else "p" * 64, code_version="bench",
    )  # fmt: skip
    (folder / "model.safetensors").write_bytes(f"weights of task {task.index}, seed {seed}".encode())
    (folder / "model.json").write_text(json.dumps(asdict(card)))
    epochs = [{"loss": 1.0 / (epoch + 1), "ce": 0.5, "kd": 0.5} for epoch in range(EPOCHS)]
    Training("train.parquet", 10, 1.0, {}, epochs).write(folder / "training.json")
    return card


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0
