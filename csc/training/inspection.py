"""Gather what a page shows of a task's model: counts of its scores, images with where it looks, its label graph."""

import io
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import adaptive_max_pool2d

from csc.artifacts import Training
from csc.config import differences
from csc.data import FORMATS
from csc.data.evidence import THRESHOLDS, Evidence, EvidenceImage, Reliability, TaskFacts
from csc.data.feature_maps import map_channels
from csc.data.scores import Scores
from csc.data.shards import ImageShards
from csc.data.views import View
from csc.distributed.group import single_process
from csc.metrics import confidence_bins
from csc.model import MEMORY, TRAINING_LOG, ModelCard, load_network
from csc.nets.activation import class_activation_maps
from csc.nets.network import Network
from csc.replay.memory import Memory
from csc.scenario import Scenario
from csc.training.batches import plain_batches
from csc.training.device import for_inference

__all__ = ["gather_evidence"]

PANEL = 16  # images of each class whose scores are kept after every task
FOLLOWED = 8  # images of the panels that are shown after every task
MEMORIES, ALL_MEMORIES = 3, 120  # thumbnails of a class, and in all
SHOTS, ALL_SHOTS = 6, 240  # images of a kind and class, and of a kind in all
SIDE, QUALITY = 96, 72  # of a thumbnail
HEAT_SIDE = 16  # cells of a heat map to a side, at most

Choices = list[tuple[str, int, int]]  # kind, class, row of the view


def gather_evidence(model: Path, view: View, scores: Scores, maps_uri: str, seconds: float) -> Evidence:
    """The evidence of a model that has scored its test images, which took so many seconds.

    `maps_uri` is the uri of cached feature maps that the network gets instead of images, or empty.
    """
    network, card = load_network(model, map_channels=map_channels(maps_uri))
    columns = [card.classes.index(name) for name in view.classes]  # all, unless a model was extended
    card = replace(card, classes=view.classes, new=tuple(name for name in card.new if name in view.classes))
    chosen = _choice(view, scores, card)
    heats = _heat_maps(network, view, card, [(row, columns[column]) for _, column, row in chosen], maps_uri)
    shown, pictures = _shown(chosen, scores, card), _Pictures(view)
    images = [
        EvidenceImage(
            kind=kind,
            name=card.classes[column],
            image_id=pictures.ids[row],
            score=float(scores.confidences[row, column]),
            labels=[card.classes[label] for label in np.flatnonzero(scores.targets[row])],
            thumbnail=pictures.thumbnail(row) if (kind, column, row) in shown else b"",
            heat=heats[row, columns[column]].tobytes(),
            heat_width=heats[row, columns[column]].shape[1],
        )
        for kind, column, row in chosen
    ]
    exemplars, remembered = _memory(model, view)
    name, matrix = _correlation(network)
    shown_matrix = [[matrix[one][other] for other in columns] for one in columns] if matrix else []
    facts = _task_facts(model, card, view, scores, (name, shown_matrix), seconds, exemplars)
    return Evidence(facts, (*images, *remembered))


def _choice(view: View, scores: Scores, card: ModelCard) -> Choices:
    """The most confident hits and false alarms, the clearest misses, and the panel of each class."""
    threshold = card.resolved_config().threshold
    order, shots = _fixed_order(view), _shots(card)
    chosen: Choices = []
    for column, (confidence, present) in enumerate(zip(scores.confidences.T, scores.targets.T, strict=True)):
        predicted = confidence > threshold
        falling = np.argsort(-confidence, kind="stable")
        kinds = {
            "hit": falling[(predicted & present)[falling]][:shots],
            "false alarm": falling[(predicted & ~present)[falling]][:shots],
            "miss": falling[::-1][(~predicted & present)[falling[::-1]]][:shots],
            "panel": order[present[order]][:PANEL],
        }
        chosen += [(kind, column, row) for kind, rows in kinds.items() for row in rows.tolist()]
    return chosen


def _shots(card: ModelCard) -> int:
    """How many images of a kind are shown of each class: fewer if there are many classes."""
    return max(3, min(SHOTS, ALL_SHOTS // len(card.classes)))


def _fixed_order(view: View) -> NDArray[np.intp]:
    """A random order of the images that depends on their ids alone, so it is the same for all tasks."""
    digests = [zlib.crc32(name.encode()) for name in view.table["image_id"].to_pylist()]
    return np.argsort(digests, kind="stable")


def _shown(chosen: Choices, scores: Scores, card: ModelCard) -> set[tuple[str, int, int]]:
    """Which of the chosen get a thumbnail: of the panel, the missed old ones and those with the most classes."""
    threshold, old = card.resolved_config().threshold, card.old
    panel = [choice for choice in chosen if choice[0] == "panel"]
    followed = {row for row, _ in Counter(row for _, _, row in panel).most_common(FOLLOWED)}
    missed = []
    for column in range(old):
        rows = [row for _, owner, row in panel if owner == column and scores.confidences[row, column] <= threshold]
        rows.sort(key=lambda row: float(scores.confidences[row, column]))
        missed += [("panel", column, row) for row in rows[: _shots(card)]]
    others = [choice for choice in chosen if choice[0] != "panel"]
    return {*others, *missed, *(choice for choice in panel if choice[2] in followed)}


def _heat_maps(
    network: Network, view: View, card: ModelCard, pairs: Sequence[tuple[int, int]], maps_uri: str
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """Where the network looks, by (row, class)."""
    config, device = card.resolved_config(), single_process().device
    frozen = for_inference(network, config, device)
    rows = sorted({row for row, _ in pairs})
    wanted: dict[int, list[int]] = {}
    for row, column in set(pairs):
        wanted.setdefault(row, []).append(column)
    size = config.train.batch_size
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    found = {}
    for some, batch in zip(batches, plain_batches(view, batches, config, maps_uri, device), strict=True):
        with torch.inference_mode():
            maps = class_activation_maps(frozen, batch.to(device).images)
            if max(maps.shape[2:]) > HEAT_SIDE:
                maps = adaptive_max_pool2d(maps, HEAT_SIDE)
        coarse = (maps * 255).round().to(torch.uint8).cpu().numpy()
        found.update({(row, column): coarse[index, column] for index, row in enumerate(some) for column in wanted[row]})
    return found


class _Pictures:
    """Thumbnails of a view's images."""

    def __init__(self, view: View) -> None:
        self.ids, self.shards = view.table["image_id"].to_pylist(), ImageShards(view.shards_uri)
        self.positions = view.positions()
        self._made: dict[int, bytes] = {}

    def thumbnail(self, row: int) -> bytes:
        """A small JPEG with the proportions of the image."""
        if row not in self._made:
            with Image.open(io.BytesIO(self.shards.jpeg(*self.positions[row])), formats=FORMATS) as image:
                image.draft("RGB", (2 * SIDE, 2 * SIDE))
                small = image.convert("RGB")
            small.thumbnail((SIDE, SIDE))
            encoded = io.BytesIO()
            small.save(encoded, "JPEG", quality=QUALITY)
            self._made[row] = encoded.getvalue()
        return self._made[row]


def _memory(model: Path, view: View) -> tuple[int, list[EvidenceImage]]:
    """How many images the model keeps for replay, and the first of each class."""
    if not (model / MEMORY).is_file():
        return 0, []
    memory = Memory.read(model / MEMORY)
    pictures = _Pictures(memory.view(view))
    images: list[EvidenceImage] = []
    count = Counter[str]()
    for row in np.argsort(memory.rank, kind="stable").tolist():
        labels = [memory.classes[label] for label in np.flatnonzero(memory.labels[row])]
        owner = int(memory.owner[row])
        name = memory.classes[owner] if owner >= 0 else next(iter(labels), "")
        if count[name] < MEMORIES and len(images) < ALL_MEMORIES:
            count[name] += 1
            images.append(EvidenceImage("memory", name, pictures.ids[row], 0.0, labels, pictures.thumbnail(row)))
    return len(memory), images


def _task_facts(
    model: Path,
    card: ModelCard,
    view: View,
    scores: Scores,
    correlation: tuple[str, list[list[float]]],
    seconds: float,
    exemplars: int,
) -> TaskFacts:
    training = Training.read(model / TRAINING_LOG)
    groups = {"old": slice(0, card.old), "new": slice(card.old, None)}
    name, matrix = correlation
    positives = [column[present] for column, present in zip(scores.confidences.T, scores.targets.T, strict=True)]
    return TaskFacts(
        task=card.task,
        classes=list(card.classes),
        old=card.old,
        threshold=card.resolved_config().threshold,
        thresholds=list(card.thresholds.values()) if card.calibration else [],
        settings=differences(Scenario.parse(card.scenario).dataset, card.resolved_config()),
        data=view.shards_uri.removesuffix("/images"),
        packages=training.packages,
        epochs=training.epochs,
        train_images=training.images,
        train_seconds=training.seconds,
        test_images=len(view),
        test_seconds=seconds,
        present=[len(column) for column in positives],
        predicted=[_above(column) for column in scores.confidences.T],
        found=[_above(column) for column in positives],
        reliability={
            group: _reliability(scores.confidences[:, part], scores.targets[:, part])
            for group, part in groups.items()
            if scores.confidences[:, part].size
        },
        correlation=matrix,
        correlation_name=name,
        exemplars=exemplars,
    )


def _above(confidences: NDArray[np.float32]) -> list[int]:
    """How many confidences are above each threshold, compared in their own precision as the metrics do."""
    limits = np.array(THRESHOLDS, confidences.dtype)
    counts: list[int] = (len(confidences) - np.searchsorted(np.sort(confidences), limits, side="right")).tolist()
    return counts


def _reliability(confidences: NDArray[np.float32], targets: NDArray[np.bool_]) -> Reliability:
    count, confidence, present = confidence_bins(confidences, targets)
    return Reliability(count.tolist(), confidence.tolist(), present.tolist())


def _correlation(network: Network) -> tuple[str, list[list[float]]]:
    """The name of the matrix that relates the classes, and its rows; nothing if the head has none."""
    name, matrix = network.head.correlation() or ("", torch.zeros(0, 0))
    rows: list[list[float]] = matrix.detach().float().numpy().round(5).tolist()
    return name, rows
