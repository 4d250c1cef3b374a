"""What is kept of earlier tasks: exemplars, with the part of their labels that is known.

An exemplar knows the labels of the classes of the task it was stored in. With `memory.labels=own_to_current` it also
learns those of each later task: the task's train view holds every image with one of its classes, so it says which of
them an exemplar has, and one that is not in it has none. There is no other source of labels.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from csc.config.schema import Memory as MemorySettings
from csc.data.columns import from_numpy, to_numpy
from csc.data.views import View
from csc.errors import BadModel
from csc.replay.samplers import herding, ocdm, prs, reservoir
from csc.scenario import Task
from csc.storage import atomic_file

__all__ = ["Memory", "joined", "read_memory", "update", "write_memory"]

Scope = Literal["own_task", "own_to_current"]
Features = Callable[[], NDArray[np.float32]]
Logits = Callable[[Sequence[int]], NDArray[np.float32]]

_METADATA_KEY = b"csc"
_PLACES = pa.schema([("image_id", pa.string()), ("shard", pa.int32()), ("row", pa.int32())])
_COLUMNS = pa.schema(
    [
        *_PLACES,
        ("labels", pa.list_(pa.int16())),
        ("first", pa.int32()),
        ("last", pa.int32()),
        ("owner", pa.int16()),
        ("rank", pa.int32()),
        ("logits", pa.list_(pa.float32())),
    ]
)
_ARRAYS = ("labels", "known", "owner", "rank", "logits", "stored")  # of a memory, with a row for each exemplar


@dataclass(frozen=True, eq=False)
class Memory:
    """Exemplars of earlier tasks; M of them, over n classes."""

    table: pa.Table  # image_id: string, shard: int32, row: int32
    labels: NDArray[np.bool_]  # (M, n), only within the known range
    known: NDArray[np.int32]  # (M, 2): labels of the classes [first, last) are known
    owner: NDArray[np.int16]  # (M,): the class an exemplar stands for; -1 if it was drawn from the stream
    rank: NDArray[np.int32]  # (M,): its place in the order of that class; the last ones leave first
    logits: NDArray[np.float32]  # (M, n): what the model said when the exemplar was stored, of the leading classes
    stored: NDArray[np.int32]  # (M,): of how many
    counts: NDArray[np.int64]  # (n,): how often each class was in the stream so far
    seen: int  # images in the stream so far
    classes: tuple[str, ...]  # all seen classes
    fingerprint: str  # of the data set

    @classmethod
    def empty(cls, fingerprint: str) -> "Memory":
        """A memory of nothing, before the first task."""
        nothing, none = np.zeros((0, 0)), np.zeros(0)
        return cls(
            table=_PLACES.empty_table(),
            labels=nothing.astype(bool),
            known=np.zeros((0, 2), np.int32),
            owner=none.astype(np.int16),
            rank=none.astype(np.int32),
            logits=nothing.astype(np.float32),
            stored=none.astype(np.int32),
            counts=none.astype(np.int64),
            seen=0,
            classes=(),
            fingerprint=fingerprint,
        )

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def known_mask(self) -> NDArray[np.bool_]:
        """Which entries of the labels are known: (M, n)."""
        index = np.arange(len(self.classes))
        return (self.known[:, :1] <= index) & (index < self.known[:, 1:])

    def taught(self, view: View, task: Task, scope: Scope) -> "Memory":
        """The memory as a task sees it: over all seen classes and, in its scope, with the labels of the new ones.

        Teaching the same task again changes nothing.

        Args:
            view: train view of the task.
            task: which increment.
            scope: of the labels: `own_task`, or `own_to_current` for those of later tasks too.
        """
        self._check(view, task)
        more = len(task.seen) - len(self.classes)
        labels = np.pad(self.labels, ((0, 0), (0, more)))
        known = self.known.copy()
        if scope == "own_to_current":
            learns = known[:, 1] >= len(task.old)  # knows all classes from its own task on, so far
            import pyarrow.compute as pc  # half of Arrow's time to import: not for those without a memory

            ids = view.table["image_id"].combine_chunks()
            row = to_numpy(pc.fill_null(pc.index_in(self.table["image_id"], value_set=ids), -1))
            new = view.targets()[row, len(task.old) :]
            labels[learns, len(task.old) :] = (new & (row >= 0)[:, None])[learns]
            known[learns, 1] = len(task.seen)
        return replace(
            self,
            labels=labels,
            known=known,
            logits=np.pad(self.logits, ((0, 0), (0, more))),
            counts=np.pad(self.counts, (0, more)),
            classes=task.seen,
        )

    def _check(self, view: View, task: Task) -> None:
        if self.fingerprint != view.fingerprint:
            raise BadModel(
                f"the memory of the prior model is of the data set {self.fingerprint}, the train view of task "
                f"{task.index} is of {view.fingerprint}; train all tasks on one data set"
            )
        if self.classes not in ((), task.old, task.seen):
            raise BadModel(
                f"the memory of the prior model has {_extent(self.classes)}, task {task.index} needs that of the task "
                f"before, with {_extent(task.old)}"
            )

    def view(self, like: View) -> View:
        """The exemplars as a view of the same data set, with the labels they know.

        Args:
            like: a view of the task that the memory was taught.
        """
        columns = {name: self.table[name] for name in _PLACES.names}
        kind = like.table.schema.field("labels").type
        table = pa.table(columns | {"labels": _label_lists(self, kind)}, schema=like.table.schema)
        return replace(like, table=table)

    def chosen(self, rows: NDArray[np.intp]) -> "Memory":
        """Some of the exemplars, in the given order."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, table=self.table.take(from_numpy(rows)), **arrays)

    def holds(self, view: View) -> NDArray[np.bool_]:
        """Which images of a view are among the exemplars."""
        import pyarrow.compute as pc  # as above

        ids = self.table["image_id"].combine_chunks()
        return to_numpy(pc.is_in(view.table["image_id"], value_set=ids))


def joined(view: View, memory: Memory) -> View:
    """The images of a task and, after them, the exemplars."""
    return replace(view, table=pa.concat_tables([view.table, memory.view(view).table]))


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
    """The memory after a task.

    Args:
        memory: from before the task, taught or not.
        view: train view of the task.
        task: which increment.
        settings: sampler and size.
        seed: of the run.
        features: gives a feature vector for each image of the view; only asked for herding.
        logits: gives logits of the seen classes for some rows of the view; asked once, for those newly stored. None
            to store no logits.
    """
    memory = memory.taught(view, task, settings.labels)
    labels = view.targets()
    labels[:, : len(task.old)] = False
    rng = np.random.default_rng([seed, task.index])
    if settings.sampler in ("reservoir", "prs", "ocdm"):
        kept, chosen = _from_stream(memory, view, labels, settings, rng)
    else:
        kept, chosen = _by_class(memory, view, labels, settings, rng, features)
    said = np.zeros((len(chosen.rows), len(task.seen)), np.float32)
    if logits is not None and len(chosen.rows):
        said[:] = logits(chosen.rows.tolist())
    new = {
        "labels": labels[chosen.rows],
        "known": np.tile(np.array([len(task.old), len(task.seen)], np.int32), (len(chosen.rows), 1)),
        "owner": chosen.owner.astype(np.int16),
        "rank": chosen.rank.astype(np.int32),
        "logits": said,
        "stored": np.full(len(chosen.rows), 0 if logits is None else len(task.seen), np.int32),
    }
    places = view.table.select(_PLACES.names).take(from_numpy(chosen.rows)).cast(_PLACES)
    arrays: dict[str, Any] = {name: np.concatenate([getattr(kept, name), values]) for name, values in new.items()}
    return replace(
        kept,
        table=pa.concat_tables([kept.table, places]).combine_chunks(),
        counts=kept.counts + labels.sum(axis=0),
        seen=kept.seen + int(labels.any(axis=1).sum()),
        **arrays,
    )


@dataclass(frozen=True)
class _Chosen:
    """Rows of a view to store, with the class each stands for and its place in the order of that class."""

    rows: NDArray[np.intp]
    owner: NDArray[np.intp]
    rank: NDArray[np.intp]


def _by_class(
    memory: Memory,
    view: View,
    labels: NDArray[np.bool_],
    settings: MemorySettings,
    rng: np.random.Generator,
    features: Features,
) -> tuple[Memory, _Chosen]:
    """The first k of each class: of an old one by the order it has, of a new one by herding or as drawn.

    A total is split as ⌈total / n⌉, so it may be exceeded by less than n. With `unique`, an image that is
    stored is not stored again for another class, and nothing comes in its place.
    """
    k = settings.per_class or math.ceil(settings.total / len(memory.classes))
    kept = memory.chosen(np.flatnonzero(memory.rank < k))
    stored = kept.holds(view)
    vectors = features() if settings.sampler == "herding" else None
    found = []
    for owner in range(labels.shape[1]):
        rows = np.flatnonzero(labels[:, owner])
        order = rng.permutation(len(rows))[:k] if vectors is None else herding(vectors[rows], k)
        rows = rows[order]
        rank = np.flatnonzero(~stored[rows]) if settings.unique else np.arange(len(rows))
        stored[rows] = True
        found.append((rows[rank], np.full(len(rank), owner), rank))
    return kept, _Chosen(*map(np.concatenate, zip(*found, strict=True)))


def _from_stream(
    memory: Memory, view: View, labels: NDArray[np.bool_], settings: MemorySettings, rng: np.random.Generator
) -> tuple[Memory, _Chosen]:
    """What is left of the memory, and new in it, after the images of a view came by in a random order.

    Images without a visible label do not take part; with `unique`, nor do those that the memory has.
    """
    slots = settings.total
    memory = memory.chosen(np.sort(rng.permutation(len(memory))[:slots]))  # all, unless the total became smaller
    takes_part = labels.any(axis=1)
    if settings.unique:
        takes_part &= ~memory.holds(view)
    order = rng.permutation(np.flatnonzero(takes_part))
    if settings.sampler == "reservoir":
        indices = reservoir(len(memory), len(order), memory.seen, slots, rng)
    elif settings.sampler == "prs":
        indices = prs(memory.labels, labels[order], memory.counts, slots, settings.rho, rng)
    else:
        indices = ocdm(memory.labels, labels[order], memory.counts, slots, settings.rho)
    kept, rows = indices[indices < len(memory)], order[indices[indices >= len(memory)] - len(memory)]
    return memory.chosen(kept), _Chosen(rows, np.full(len(rows), -1), np.zeros(len(rows), np.intp))


def write_memory(memory: Memory, path: Path) -> None:
    """Write a memory as Parquet; classes, counts and data fingerprint go into the file's metadata."""
    leading = np.arange(len(memory.classes)) < memory.stored[:, None]
    columns = {
        **{name: memory.table[name] for name in _PLACES.names},
        "labels": _label_lists(memory, pa.list_(pa.int16())),
        "first": from_numpy(memory.known[:, 0]),
        "last": from_numpy(memory.known[:, 1]),
        "owner": from_numpy(memory.owner),
        "rank": from_numpy(memory.rank),
        "logits": _lists(leading, memory.logits, pa.list_(pa.float32())),
    }
    facts = {
        "classes": memory.classes,
        "counts": memory.counts.tolist(),
        "seen": memory.seen,
        "fingerprint": memory.fingerprint,
    }
    table = pa.table(columns, schema=_COLUMNS)
    with atomic_file(path) as aside:
        pq.write_table(table.replace_schema_metadata({_METADATA_KEY: json.dumps(facts)}), aside)


def read_memory(path: str | Path) -> Memory:
    """Read a memory back."""
    try:
        table = pq.ParquetFile(path).read()
        return _decoded(table.cast(_COLUMNS), json.loads(table.schema.metadata[_METADATA_KEY]))
    except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BadModel(f"{path}: not the memory of a model ({reason}); train the task that wrote it again") from None


def _decoded(table: pa.Table, facts: dict[str, Any]) -> Memory:
    lists = {name: table[name].combine_chunks() for name in ("labels", "logits")}
    if any(column.null_count for column in [*table.columns, *(column.flatten() for column in lists.values())]):
        raise ValueError("values are missing")
    classes = tuple(facts["classes"])
    counts, stored = (np.diff(to_numpy(column.offsets)) for column in lists.values())
    rows, indices = np.repeat(np.arange(len(table)), counts), to_numpy(lists["labels"].flatten())
    labels = np.zeros((len(table), len(classes)), dtype=bool)
    labels[rows, indices] = True
    logits = np.zeros(labels.shape, np.float32)
    logits[np.arange(len(classes)) < stored[:, None]] = to_numpy(lists["logits"].flatten())
    memory = Memory(
        table=table.select(_PLACES.names),
        labels=labels,
        known=np.stack([to_numpy(table["first"]), to_numpy(table["last"])], axis=1),
        owner=to_numpy(table["owner"]),
        rank=to_numpy(table["rank"]),
        logits=logits,
        stored=stored,
        counts=np.array(facts["counts"], np.int64),
        seen=int(facts["seen"]),
        classes=classes,
        fingerprint=str(facts["fingerprint"]),
    )
    last = len(classes)
    if memory.counts.shape != (last,) or (memory.known < 0).any() or (memory.known > last).any():
        raise ValueError(f"it does not fit its {last} classes")
    if (indices < 0).any() or (labels & ~memory.known_mask()).any():
        raise ValueError("labels that cannot be known")
    return memory


def _extent(classes: tuple[str, ...]) -> str:
    return f"{len(classes)} classes ({classes[0]} to {classes[-1]})" if classes else "no class"


def _label_lists(memory: Memory, kind: pa.DataType) -> pa.ListArray:
    indices = np.arange(len(memory.classes), dtype=np.int16)
    return _lists(memory.labels, np.broadcast_to(indices, memory.labels.shape), kind)


def _lists(mask: NDArray[np.bool_], values: NDArray[Any], kind: pa.DataType) -> pa.ListArray:
    """The values under a mask, a list for each row."""
    offsets = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(from_numpy(offsets), from_numpy(values[mask]), type=kind)
