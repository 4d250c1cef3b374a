"""The memory: exemplars of earlier tasks, with the part of their labels that is known.

An exemplar has the labels of the classes of the task it was stored in. With `memory.labels=own_to_current` it also gets
those of each later task: the task's train view has every image with one of its classes, so it says which of them an
exemplar has, and one that is not in it has none. There is no other source of labels.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from csc.data.columns import from_numpy, to_numpy
from csc.data.views import View
from csc.errors import BadModel
from csc.scenario import Task
from csc.storage import atomic_file, regular_file

__all__ = ["POSITIONS", "Memory", "joined"]

Scope = Literal["own_task", "own_to_current"]
POSITIONS = pa.schema([("image_id", pa.string()), ("shard", pa.int32()), ("row", pa.int32())])
_METADATA_KEY = b"csc"
_COLUMNS = pa.schema(
    [
        *POSITIONS,
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
    rank: NDArray[np.int32]  # (M,): its position in the order of that class; the last ones leave first
    logits: NDArray[np.float32]  # (M, n): of the model when the exemplar was stored, for the leading classes
    stored: NDArray[np.int32]  # (M,): for how many of the leading classes `logits` has values
    counts: NDArray[np.int64]  # (n,): how often each class was in the stream so far
    seen: int  # images in the stream so far
    classes: tuple[str, ...]  # all seen classes
    fingerprint: str  # of the data set

    @classmethod
    def empty(cls, fingerprint: str) -> "Memory":
        """A memory without exemplars, before the first task."""
        return cls(
            table=POSITIONS.empty_table(),
            labels=np.zeros((0, 0), bool),
            known=np.zeros((0, 2), np.int32),
            owner=np.zeros(0, np.int16),
            rank=np.zeros(0, np.int32),
            logits=np.zeros((0, 0), np.float32),
            stored=np.zeros(0, np.int32),
            counts=np.zeros(0, np.int64),
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

    def extended_to(self, view: View, task: Task, scope: Scope) -> "Memory":
        """The memory over all classes seen in a task and, depending on the scope, with the labels of the new ones.

        Extending it to the same task again changes nothing. `view` is the train view of the task.
        """
        self._check(view, task)
        more = len(task.seen) - len(self.classes)
        labels = np.pad(self.labels, ((0, 0), (0, more)))
        known = self.known.copy()
        if scope == "own_to_current":
            learns = known[:, 1] >= len(task.old)  # has the labels of all tasks since its own
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
        """The exemplars as a view, with their known labels; `like` is a view of the task they were extended to."""
        columns = {name: self.table[name] for name in POSITIONS.names}
        kind = like.table.schema.field("labels").type
        table = pa.table(columns | {"labels": _label_lists(self, kind)}, schema=like.table.schema)
        return replace(like, table=table)

    def take(self, rows: NDArray[np.intp]) -> "Memory":
        """Some of the exemplars, in the given order."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, table=self.table.take(from_numpy(rows)), **arrays)

    def contains(self, view: View) -> NDArray[np.bool_]:
        """Which images of a view are among the exemplars."""
        import pyarrow.compute as pc  # as above

        ids = self.table["image_id"].combine_chunks()
        return to_numpy(pc.is_in(view.table["image_id"], value_set=ids))

    def write(self, path: Path) -> None:
        """Write it as Parquet; classes, counts and data fingerprint go into the file's metadata."""
        leading = np.arange(len(self.classes)) < self.stored[:, None]
        columns = {
            **{name: self.table[name] for name in POSITIONS.names},
            "labels": _label_lists(self, pa.list_(pa.int16())),
            "first": from_numpy(self.known[:, 0]),
            "last": from_numpy(self.known[:, 1]),
            "owner": from_numpy(self.owner),
            "rank": from_numpy(self.rank),
            "logits": _lists(leading, self.logits, pa.list_(pa.float32())),
        }
        metadata = {
            "classes": self.classes,
            "counts": self.counts.tolist(),
            "seen": self.seen,
            "fingerprint": self.fingerprint,
        }
        table = pa.table(columns, schema=_COLUMNS)
        with atomic_file(path) as temporary:
            pq.write_table(table.replace_schema_metadata({_METADATA_KEY: json.dumps(metadata)}), temporary)

    @classmethod
    def read(cls, path: str | Path) -> "Memory":
        """Read what `write` wrote."""
        try:
            table = pq.ParquetFile(regular_file(path)).read()
            return _decoded(table.cast(_COLUMNS), json.loads(table.schema.metadata[_METADATA_KEY]))
        except (OSError, pa.ArrowException, LookupError, TypeError, ValueError, RecursionError) as error:
            raise BadModel(f"{path}: not the memory of a model ({error}); train the task that wrote it again") from None


def joined(view: View, memory: Memory) -> View:
    """The images of a task and, after them, the exemplars."""
    return replace(view, table=pa.concat_tables([view.table, memory.view(view).table]))


def _decoded(table: pa.Table, metadata: dict[str, Any]) -> Memory:
    lists = {name: table[name].combine_chunks() for name in ("labels", "logits")}
    if any(column.null_count for column in [*table.columns, *(column.flatten() for column in lists.values())]):
        raise ValueError("values are missing")
    classes = tuple(metadata["classes"])
    counts, stored = (np.diff(to_numpy(column.offsets)) for column in lists.values())
    rows, indices = np.repeat(np.arange(len(table)), counts), to_numpy(lists["labels"].flatten())
    labels = np.zeros((len(table), len(classes)), dtype=bool)
    labels[rows, indices] = True
    logits = np.zeros(labels.shape, np.float32)
    logits[np.arange(len(classes)) < stored[:, None]] = to_numpy(lists["logits"].flatten())
    memory = Memory(
        table=table.select(POSITIONS.names),
        labels=labels,
        known=np.stack([to_numpy(table["first"]), to_numpy(table["last"])], axis=1),
        owner=to_numpy(table["owner"]),
        rank=to_numpy(table["rank"]),
        logits=logits,
        stored=stored,
        counts=np.array(metadata["counts"], np.int64),
        seen=int(metadata["seen"]),
        classes=classes,
        fingerprint=str(metadata["fingerprint"]),
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
