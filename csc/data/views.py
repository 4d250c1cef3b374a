"""Task views: what one task may see of a data set.

The train view of task t has the images with at least one class of task t, and of their labels only those of task t.
The test view has the images with at least one class seen so far, with all seen labels. A view points into the image
shards and has their address, so that its readers never need the data set's label table.
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from csc.data.columns import check_positions, from_numpy, strings, to_numpy
from csc.data.dataset import Dataset
from csc.data.published import benchmark_note
from csc.errors import BadData, explained
from csc.scenario import Task
from csc.storage import atomic_file, regular_file

__all__ = ["View", "test_view", "train_view"]

_METADATA_KEY = b"csc"
MOST_CLASSES = 1 << 15  # labels are 16-bit numbers
_COLUMNS = [("image_id", pa.string()), ("shard", pa.int32()), ("row", pa.int32()), ("labels", pa.list_(pa.int16()))]


@dataclass(frozen=True)
class View:
    """Rows of images with the labels a task may see, as indices into `classes`."""

    table: pa.Table  # image_id, shard, row, labels: list<int16>
    classes: tuple[str, ...]
    shards_uri: str
    fingerprint: str
    note: str = ""  # how the data set differs from the benchmark of its name; empty if it does not

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def targets(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Multi-hot labels, one row per image."""
        labels = self.table["labels"].combine_chunks()
        dense = np.zeros((len(self), len(self.classes)), dtype=bool)
        offsets = to_numpy(labels.offsets)
        rows = np.repeat(np.arange(len(self)), np.diff(offsets))
        dense[rows, to_numpy(labels.values[offsets[0] : offsets[-1]])] = True
        return dense

    def positions(self) -> list[list[int]]:
        """Shard of each image, and row there."""
        columns = [to_numpy(self.table["shard"]), to_numpy(self.table["row"])]
        return np.stack(columns, axis=1).tolist()  # type: ignore[no-any-return]

    def filter(self, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> "View":
        """Only the images that a mask keeps."""
        return replace(self, table=self.table.filter(from_numpy(kept)))

    def write(self, path: Path) -> None:
        """Write it as Parquet; classes, image address, data fingerprint and a digest go into the file's metadata."""
        metadata = _Metadata(self.classes, self.shards_uri, self.fingerprint, self.note)
        metadata = msgspec.structs.replace(metadata, digest=_digest(self.table, metadata))
        table = self.table.replace_schema_metadata({_METADATA_KEY: msgspec.json.encode(metadata)})
        with atomic_file(path) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def read(cls, path: str | Path) -> "View":
        """Read what `write` wrote; content that has changed since is refused."""
        try:
            table = pq.ParquetFile(regular_file(path)).read()
            metadata = msgspec.json.decode((table.schema.metadata or {}).get(_METADATA_KEY, b"{}"), type=_Metadata)
            _check(table, len(metadata.classes))
            if _digest(table, metadata) != metadata.digest:
                raise ValueError("its content is not what was written")
            return cls(table, metadata.classes, metadata.images, metadata.fingerprint, metadata.note)
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            reason = f"not a task view ({explained(error)})"
            raise BadData(f"{path}: {reason}; build it again with the build_dataset step") from None


def train_view(dataset: Dataset, task: Task, *, labels: str = "task", held_out: int = 0) -> View:
    """The training images of a task.

    Args:
        dataset: where the labels come from.
        task: which increment.
        labels: `task` shows the labels of the new classes only; `seen` shows those of all classes so far, which only
            the upper bound may ask for.
        held_out: of so many training images one is left out, to be tested on; 0 for none.
    """
    shown = {"task": task.new, "seen": task.seen}[labels]
    view = _view(dataset, "train", shown, task.seen)
    if held_out:
        view = view.filter(~_held_out(view, held_out))
    if len(view) == 0:
        raise BadData(
            f"{dataset.uri}: no training image for task {task.index}; none has one of its classes {', '.join(shown)}"
        )
    return view


def test_view(dataset: Dataset, task: Task, *, held_out: int = 0) -> View:  # noqa: PT028  # no test, a view
    """The test images of a task: those with any class seen so far, with all seen labels that the data set has.

    With `held_out`, the training images that `train_view` leaves out replace the test images, so that settings can be
    chosen without the test images.
    """
    split = "train" if held_out else "test"
    labelled = tuple(name for name in task.seen if name in dataset.classes)  # all, unless a model was extended
    view = _view(dataset, split, labelled, labelled)
    if held_out:
        view = view.filter(_held_out(view, held_out))
    if len(view) == 0:
        raise BadData(f"{dataset.uri}: no test image for task {task.index}; none has a class seen so far")
    return view


def _held_out(view: View, every: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which images are held out: decided by their ids alone, so the same ones for every task and order."""
    return np.array([zlib.crc32(name.encode()) % every == 0 for name in view.table["image_id"].to_pylist()], bool)


def _view(dataset: Dataset, split: str, shown: Sequence[str], seen: Sequence[str]) -> View:
    """The images of a split that belong to one of the classes `shown`, with these labels, as indices into `seen`."""
    if len(seen) > MOST_CLASSES:
        raise BadData(f"{dataset.uri}: {len(seen):,} classes; a task view can have at most {MOST_CLASSES:,}")
    import pyarrow.compute as pc  # half of Arrow's time to import: not for those who only read views

    table = dataset.labels()
    table = table.filter(pc.equal(table["split"], strings([split])[0]))
    rows, values = _pairs(table["labels"], shown)
    is_member = np.zeros(table.num_rows, dtype=bool)
    is_member[rows] = True
    if dataset.difficult_is_member:
        is_member[_pairs(table["difficult"], shown)[0]] = True
    index_of = {name: index for index, name in enumerate(seen)}
    indices = np.array([index_of[name] for name in shown], dtype=np.int16)[values]
    counts = np.bincount(rows, minlength=table.num_rows)[is_member]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    members = table.filter(from_numpy(is_member)).select(["image_id", "shard", "row"])
    labels = pa.ListArray.from_arrays(from_numpy(offsets), from_numpy(indices))
    shown_rows = members.append_column("labels", pa.chunked_array([labels]))
    return View(shown_rows, tuple(seen), dataset.shards_uri, dataset.fingerprint, benchmark_note(dataset))


def _pairs(column: pa.ChunkedArray, classes: Sequence[str]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(row, index into `classes`) of every label in `column` that is one of `classes`."""
    import pyarrow.compute as pc  # as above

    lists = column.combine_chunks()
    index = pc.index_in(lists.flatten(), value_set=strings(classes))
    known = to_numpy(pc.is_valid(index))
    rows = to_numpy(pc.list_parent_indices(lists))
    return rows[known], to_numpy(index.drop_null())


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the metadata of the file say of a view; the digest covers the rows and all other metadata."""

    classes: tuple[str, ...]
    images: str
    fingerprint: str
    note: str
    digest: str = ""


def _digest(table: pa.Table, metadata: _Metadata) -> str:
    """The SHA-256 of rows and metadata, independent of how the file stores them."""
    labels = table["labels"].combine_chunks()
    offsets = to_numpy(labels.offsets)
    shown = labels.values[offsets[0] : offsets[-1]]
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(metadata, digest="")))
    digest.update(msgspec.json.encode(table["image_id"].to_pylist()))
    for numbers in (to_numpy(table["shard"]), to_numpy(table["row"]), np.diff(offsets), to_numpy(shown)):
        digest.update(numbers.tobytes())
    return digest.hexdigest()


def _check(table: pa.Table, classes: int) -> None:
    """Raise ValueError for rows that no view can have."""
    if [(field.name, field.type) for field in table.schema] != _COLUMNS:
        raise ValueError(f"expected the columns {', '.join(name for name, _ in _COLUMNS)}")
    check_positions(table)
    labels = to_numpy(table["labels"].combine_chunks().values)
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"a label is not one of the {classes} classes")
