"""evaluate: scores of a model on the test view, and the numbers that follow from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csc import metrics
from csc.data.columns import from_numpy, to_numpy
from csc.data.partial import View, read_view
from csc.errors import BadModel
from csc.model import load_network
from csc.steps.register import read_registered
from csc.storage import atomic_file, write_json

__all__ = ["evaluate", "read_scores"]

TARGET_PREFIX = "target:"
Scores = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Targets = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def evaluate(model: str, test_view: str, scores_out: str, metrics_out: str, prior: str = "") -> dict[str, Any]:
    """Score all test images of a task, write `scores.parquet` and `metrics.json`, and return the metrics.

    Args:
        model: model folder.
        test_view: `test.parquet` of the task.
        scores_out: file to write.
        metrics_out: file to write.
        prior: `registered.json` of the task before, for what the model has forgotten since.
    """
    from csc.training import confidences

    network, card = load_network(Path(model))
    view = read_view(test_view)
    if view.classes != card.classes:
        raise BadModel(f"{model}: knows other classes than {test_view}; both must be of the same task")
    settings = card.settings()
    scores = np.concatenate([batch.numpy() for _, batch in confidences(network, view, settings)])
    best_ap = read_registered(prior).run.tasks[-1].metrics["best_AP"] if prior else {}
    numbers = metrics.evaluate(scores, view.targets(), view.classes, settings.threshold, best_ap)
    _write_scores(view, scores, Path(scores_out))
    write_json(Path(metrics_out), numbers)
    head = " · ".join(f"{name} {numbers[name]:.2f}" for name in ("mAP", "CF1", "OF1", "FPR", "forgetting"))
    print(f"task {card.task}/{card.tasks}: {head} on {len(view):,} test images, {len(view.classes)} classes")
    return numbers


def _write_scores(view: View, scores: Scores, path: Path) -> None:
    """One float32 column per class, and its target as a bit, so that every number can be computed again."""
    targets = view.targets()
    columns = {"image_id": view.table["image_id"]}
    columns |= {name: from_numpy(scores[:, index]) for index, name in enumerate(view.classes)}
    columns |= {f"{TARGET_PREFIX}{name}": from_numpy(targets[:, index]) for index, name in enumerate(view.classes)}
    with atomic_file(path) as aside:
        pq.write_table(pa.Table.from_arrays(list(columns.values()), names=list(columns)), aside)


def read_scores(path: Path) -> tuple[Scores, Targets, list[str]]:
    """Read `scores.parquet` back: confidences, targets and class names."""
    table = pq.ParquetFile(path).read()
    classes = [name for name in table.column_names if name != "image_id" and not name.startswith(TARGET_PREFIX)]
    scores = np.stack([to_numpy(table[name]) for name in classes], axis=1)
    targets = np.stack([to_numpy(table[TARGET_PREFIX + name]) for name in classes], axis=1)
    return scores, targets, classes
