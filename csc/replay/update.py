"""Update the memory after a task: which exemplars stay, and which images of the task are added."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from csc.config.groups import MemorySettings
from csc.data.columns import from_numpy
from csc.data.views import View
from csc.replay.memory import POSITIONS, Memory
from csc.replay.samplers import Rows, herding, ocdm, prs, reservoir
from csc.scenario import Task

__all__ = ["update"]

Features = Callable[[], NDArray[np.float32]]
Logits = Callable[[Sequence[int]], NDArray[np.float32]]
Added = tuple[Rows, Rows, Rows]  # rows of a view to store, the class each stands for, its rank within that class


def update(
    memory: Memory,
    view: View,
    task: Task,
    settings: MemorySettings,
    *,
    seed: int,
    features: Features,
    logits: Logits | None = None,
) -> Memory:
    """The memory after a task, from that before it (extended to the task or not) and the task's train view.

    `features` gives a feature vector of each image of the view; it is only called for herding. `logits` gives those of
    the seen classes for the rows that are added, if they are to be stored.
    """
    memory = memory.extended_to(view, task, settings.labels)
    labels = view.targets()
    labels[:, : len(task.old)] = False
    rng = np.random.default_rng([seed, task.index])
    if settings.sampler in ("reservoir", "prs", "ocdm"):
        kept, (rows, owner, rank) = _from_stream(memory, view, labels, settings, rng)
    else:
        kept, (rows, owner, rank) = _by_class(memory, view, labels, settings, rng, features)
    stored_logits = np.zeros((len(rows), len(task.seen)), np.float32)
    if logits is not None and len(rows):
        stored_logits[:] = logits(rows.tolist())
    new = {
        "labels": labels[rows],
        "known": np.tile(np.array([len(task.old), len(task.seen)], np.int32), (len(rows), 1)),
        "owner": owner.astype(np.int16),
        "rank": rank.astype(np.int32),
        "logits": stored_logits,
        "stored": np.full(len(rows), 0 if logits is None else len(task.seen), np.int32),
    }
    positions = view.table.select(POSITIONS.names).take(from_numpy(rows)).cast(POSITIONS)
    arrays: dict[str, Any] = {name: np.concatenate([getattr(kept, name), values]) for name, values in new.items()}
    return replace(
        kept,
        table=pa.concat_tables([kept.table, positions]).combine_chunks(),
        counts=kept.counts + labels.sum(axis=0),
        seen=kept.seen + int(labels.any(axis=1).sum()),
        **arrays,
    )


def _by_class(
    memory: Memory,
    view: View,
    labels: NDArray[np.bool_],
    settings: MemorySettings,
    rng: np.random.Generator,
    features: Features,
) -> tuple[Memory, Added]:
    """The first k exemplars of each class: of an old one by rank, of a new one by herding or at random.

    A total is split as ⌈total / n⌉, so it may be exceeded by less than n. With `unique`, an image that is
    stored is not stored again for another class, which then has fewer.
    """
    k = settings.per_class or math.ceil(settings.total / len(memory.classes))
    kept = memory.take(np.flatnonzero(memory.rank < k))
    stored = kept.contains(view)
    vectors = features() if settings.sampler == "herding" else None
    found = []
    for owner in range(labels.shape[1]):
        rows = np.flatnonzero(labels[:, owner])
        order = rng.permutation(len(rows))[:k] if vectors is None else herding(vectors[rows], k)
        rows = rows[order]
        rank = np.flatnonzero(~stored[rows]) if settings.unique else np.arange(len(rows))
        stored[rows] = True
        found.append((rows[rank], np.full(len(rank), owner), rank))
    rows, owners, ranks = zip(*found, strict=True)
    return kept, (np.concatenate(rows), np.concatenate(owners), np.concatenate(ranks))


def _from_stream(
    memory: Memory, view: View, labels: NDArray[np.bool_], settings: MemorySettings, rng: np.random.Generator
) -> tuple[Memory, Added]:
    """What stays and what is added when the images of a view arrive one by one in a random order.

    Images without a visible label are ignored; with `unique`, so are those that the memory has.
    """
    slots = settings.total
    memory = memory.take(np.sort(rng.permutation(len(memory))[:slots]))  # all, unless the total became smaller
    eligible = labels.any(axis=1)
    if settings.unique:
        eligible &= ~memory.contains(view)
    order = rng.permutation(np.flatnonzero(eligible))
    if settings.sampler == "reservoir":
        indices = reservoir(len(memory), len(order), memory.seen, slots, rng)
    elif settings.sampler == "prs":
        indices = prs(memory.labels, labels[order], memory.counts, slots, settings.rho, rng)
    else:
        indices = ocdm(memory.labels, labels[order], memory.counts, slots, settings.rho)
    kept, rows = indices[indices < len(memory)], order[indices[indices >= len(memory)] - len(memory)]
    return memory.take(kept), (rows, np.full(len(rows), -1), np.zeros(len(rows), np.intp))
