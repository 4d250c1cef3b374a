"""evaluate: scores of a model on the test view, and the numbers that follow from them."""

import collections
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csc import metrics
from csc.data.columns import from_numpy, to_numpy
from csc.data.features import read_features
from csc.data.views import View, read_view
from csc.errors import BadModel
from csc.model import load_network, read_card
from csc.retry import with_retries
from csc.steps.register import read_registered
from csc.storage import atomic_file, writable, write_json

__all__ = ["evaluate", "read_scores"]

TARGET_PREFIX = "target:"
ROW_GROUP = 4096
Scores = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Targets = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@with_retries
def evaluate(
    model: str, test_view: str, scores_out: str, metrics_out: str, prior: str = "", features: str = ""
) -> dict[str, Any]:
    """Score all test images of a task, write `scores.parquet` and `metrics.json`, and return the metrics.

    Args:
        model: model folder.
        test_view: `test.parquet` of the task.
        scores_out: file to write.
        metrics_out: file to write.
        prior: `registered.json` of the task before, for what the model has forgotten since.
        features: place of cached feature maps, from `embed`; the head then reads them instead of images.
    """
    from csc.distributed import group as distributed

    card, view = read_card(Path(model)), read_view(test_view)
    if view.classes != card.classes:
        raise BadModel(f"{model}: knows other classes than {test_view}; both must be of the same task")
    processes = distributed.processes_for(card.settings().train.processes, exactly=False)
    place = {"model": model, "test_view": test_view, "scores_out": scores_out, "features": features}
    if processes > 1:
        distributed.run(score, place, processes)
    else:
        score(**place)
    scores, targets, _ = read_scores(Path(scores_out))
    best_ap = read_registered(prior).run.tasks[-1].metrics["best_AP"] if prior else {}
    numbers = metrics.evaluate(scores, targets, view.classes, card.settings().threshold, best_ap)
    write_json(Path(metrics_out), numbers)
    head = " · ".join(f"{name} {numbers[name]:.2f}" for name in ("mAP", "CF1", "OF1", "FPR", "forgetting"))
    print(f"task {card.task}/{card.tasks}: {head} on {len(view):,} test images, {len(view.classes)} classes")
    return numbers


def score(model: str, test_view: str, scores_out: str, features: str) -> None:
    """Write the confidences of a model on a view, batch by batch, as `scores.parquet`; one of several processes may.

    One float32 column per class, and its target as a bit, so that every number can be computed again.
    """
    from csc.distributed import group as distributed
    from csc.training.loop import confidences

    channels = read_features(features).shape[0] if features else 0
    network, card = load_network(Path(model), map_channels=channels)
    view = read_view(test_view)
    with distributed.group() as group:
        batches = confidences(network, view, card.settings(), features, group)
        if not group.is_main:
            collections.deque(batches, maxlen=0)  # its part of the work, without the writing
            return
        _write_scores(view, (batch.numpy() for _, batch in batches), Path(scores_out))


def _write_scores(view: View, batches: Iterable[Scores], path: Path) -> None:
    targets, start = view.targets(), 0
    names = [*view.classes, *(f"{TARGET_PREFIX}{name}" for name in view.classes)]
    kinds = [pa.float32()] * len(view.classes) + [pa.bool_()] * len(view.classes)
    schema = pa.schema([("image_id", pa.string()), *zip(names, kinds, strict=True)])
    with writable(path), atomic_file(path) as aside, pq.ParquetWriter(aside, schema) as writer:
        for scores in _grouped(batches):
            rows = slice(start, start := start + len(scores))
            columns = [from_numpy(column) for part in (scores, targets[rows]) for column in part.T]
            ids = view.table["image_id"][rows.start : rows.stop].combine_chunks()
            writer.write_batch(pa.record_batch([ids, *columns], schema=schema))


def _grouped(batches: Iterable[Scores]) -> Iterator[Scores]:
    """Put batches together until they are worth a row group: the file describes every column of each."""
    waiting: list[Scores] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= ROW_GROUP:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def read_scores(path: Path) -> tuple[Scores, Targets, list[str]]:
    """Read `scores.parquet` back: confidences, targets and class names."""
    table = pq.ParquetFile(path).read()
    classes = [name for name in table.column_names if name != "image_id" and not name.startswith(TARGET_PREFIX)]
    scores = np.stack([to_numpy(table[name]) for name in classes], axis=1)
    targets = np.stack([to_numpy(table[TARGET_PREFIX + name]) for name in classes], axis=1)
    return scores, targets, classes
