"""The data-set contract: a label table beside image shards that workers memory-map.

    dataset.json        name, classes (sorted), splits with counts, fingerprint, source
    labels.parquet      image_id, split, shard, row, labels, difficult
    images/NNNNN.arrow  image_id, jpeg, width, height

Readers (`digits`, `voc`, `coco`) yield examples in order; this module writes and reads the folder.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from csc.errors import BadData
from csc.storage import atomic_folder, local_path, read_json, write_json

__all__ = ["SPLITS", "Dataset", "Example", "ImageShards", "checked_jpeg", "write_dataset"]

SPLITS = ("train", "test")
SHARD_BYTES = 64 << 20
BATCH_ROWS = 256

_IMAGES = pa.schema([("image_id", pa.string()), ("jpeg", pa.binary()), ("width", pa.int32()), ("height", pa.int32())])
_LABELS = pa.schema(
    [
        ("image_id", pa.string()),
        ("split", pa.string()),
        ("shard", pa.int32()),
        ("row", pa.int32()),
        ("labels", pa.list_(pa.string())),
        ("difficult", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Example:
    """One image as a reader hands it over.

    Attributes:
        image_id: unique within the data set.
        split: `train` or `test`.
        labels: classes with at least one ordinary object.
        difficult: classes present only as objects that the benchmark sets apart (VOC difficult, COCO crowd).
        jpeg: the encoded image.
        width: of the encoded image.
        height: of the encoded image.
    """

    image_id: str
    split: str
    labels: tuple[str, ...]
    difficult: tuple[str, ...]
    jpeg: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Dataset:
    """An ingested data set, opened for reading."""

    path: Path
    name: str
    classes: tuple[str, ...]
    splits: dict[str, dict[str, int]]
    fingerprint: str
    source: dict[str, Any]
    difficult_is_member: bool

    @classmethod
    def open(cls, uri: str | Path) -> "Dataset":
        """Open the data set in a folder; say what is missing when it is not one."""
        path = local_path(uri)
        if not (path / "dataset.json").is_file():
            raise BadData(f"{path}: not a data set (no dataset.json); make one with 'csc ingest … --out {path}'")
        info = read_json(path / "dataset.json")
        if not isinstance(info, dict):
            raise BadData(
                f"{path / 'dataset.json'}: expected an object with name, classes, splits, fingerprint, source"
            )
        try:
            dataset = cls(path=path, **(info | {"classes": tuple(info["classes"])}))
            dataset._check_types(info["classes"])
            return dataset
        except (KeyError, TypeError) as error:
            raise BadData(
                f"{path / 'dataset.json'}: wrong or missing key ({error}); ingest the data set again"
            ) from None

    def _check_types(self, classes: Any) -> None:
        """Raise for a file that has the right keys with the wrong things in them."""
        if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise TypeError("classes is not a list of names")
        if not (isinstance(self.name, str) and isinstance(self.fingerprint, str) and isinstance(self.source, dict)):
            raise TypeError("name, fingerprint or source")
        for split in SPLITS:
            int(self.splits[split]["images"])

    @property
    def images(self) -> Path:
        """The folder of image shards: all that training may see of the data set."""
        return self.path / "images"

    def labels(self) -> pa.Table:
        """The label table of all splits."""
        try:
            return pq.ParquetFile(self.path / "labels.parquet").read().cast(_LABELS)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadData(
                f"{self.path / 'labels.parquet'}: not readable ({error}); ingest the data set again"
            ) from None


class ImageShards:
    """Random access to encoded images in memory-mapped Arrow files; opens a shard when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._columns: dict[int, pa.ChunkedArray] = {}

    def jpeg(self, shard: int, row: int) -> memoryview:
        """The encoded bytes of one image, without a copy."""
        if shard not in self._columns:
            path = self.folder / f"{shard:05d}.arrow"
            try:
                self._columns[shard] = pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("jpeg")
            except (OSError, KeyError, pa.ArrowInvalid) as error:
                raise BadData(f"{path}: image shard not readable ({error}); ingest the data set again") from None
        return memoryview(self._columns[shard][row].as_buffer())

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_columns": {}}  # a worker process maps the files itself


def checked_jpeg(content: bytes, where: str) -> tuple[bytes, int, int]:
    """Return (jpeg, width, height) after decoding the image once; other formats are encoded as JPEG.

    Args:
        content: bytes of an image file.
        where: how an error names the image.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if image.format == "JPEG":
                image.draft("RGB", (1, 1))  # reads every byte, skips most of the arithmetic
                image.load()
                return content, width, height
            encoded = io.BytesIO()
            image.convert("RGB").save(encoded, "JPEG", quality=95)
            return encoded.getvalue(), width, height
    except UnidentifiedImageError:
        raise BadData(f"{where}: broken image (no known format); replace the file or leave it out of the set") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadData(f"{where}: broken image ({error}); replace the file or leave it out of the set") from None


def write_dataset(
    out: str | Path,
    name: str,
    classes: Sequence[str],
    examples: Iterable[Example],
    source: dict[str, Any],
    *,
    difficult_is_member: bool = False,
) -> Dataset:
    """Write examples as a data-set folder, atomically, and open it.

    The fingerprint covers classes, labels and image bytes, so equal fingerprints mean equal data.

    Args:
        out: folder to make; one that holds another data set is never overwritten.
        name: of the data set, as scenarios use it.
        classes: all class names, in any order.
        examples: train images first, then test images, each by rising id; streamed, never held together.
        source: where the data came from, for the record.
        difficult_is_member: whether a class in `difficult` makes an image part of that class's task.
    """
    target = local_path(out)
    _refuse_foreign(target)
    order = tuple(sorted(classes))
    with atomic_folder(target) as folder:
        (folder / "images").mkdir()
        table, digest = _write_shards(folder / "images", examples, order)
        _check_classes(table, order)
        pq.write_table(table, folder / "labels.parquet")
        digest.update(json.dumps([name, order, difficult_is_member]).encode())
        info = {
            "name": name,
            "classes": list(order),
            "splits": {split: _counts(table, split) for split in SPLITS},
            "fingerprint": digest.hexdigest(),
            "source": source,
            "difficult_is_member": difficult_is_member,
        }
        write_json(folder / "dataset.json", info)
        if (target / "dataset.json").is_file() and Dataset.open(target).fingerprint != info["fingerprint"]:
            raise BadData(f"{target}: already holds another data set; choose another --out or remove it")
    return Dataset.open(target)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not (target / "dataset.json").is_file() and (target.is_file() or any(target.iterdir())):
        raise BadData(f"{target}: exists and is not a data set; choose an empty or new folder for --out")


def _write_shards(
    folder: Path, examples: Iterable[Example], order: tuple[str, ...]
) -> tuple[pa.Table, "hashlib._Hash"]:
    """Stream the images into shards; return the label table and the digest of all content."""
    known, digest, rows = set(order), hashlib.sha256(), []
    for shard, row, example in _sharded(folder, _in_order(examples)):
        strangers = sorted({*example.labels, *example.difficult} - known)
        if strangers:
            raise BadData(f"image {example.image_id}: unknown class '{strangers[0]}'; known are {', '.join(order)}")
        labels, difficult = sorted(set(example.labels)), sorted(set(example.difficult) - set(example.labels))
        content = hashlib.sha256(example.jpeg).hexdigest()
        digest.update(json.dumps([example.image_id, example.split, labels, difficult, content]).encode())
        rows.append((example.image_id, example.split, shard, row, labels, difficult))
    if not rows:
        raise BadData("the source has no images; expected at least one training image")
    columns = [list(column) for column in zip(*rows, strict=True)]
    return pa.table(columns, schema=_LABELS), digest


def _in_order(examples: Iterable[Example]) -> Iterator[Example]:
    """Pass examples on, and stop at one that comes twice or out of order."""
    last: tuple[int, str] | None = None
    seen: set[str] = set()
    for example in examples:
        key = (SPLITS.index(example.split), example.image_id)
        if example.image_id in seen:
            raise BadData(f"image {example.image_id}: id appears twice; every image needs an id of its own")
        if last is not None and key < last:
            raise BadData(f"image {example.image_id}: examples must come by split (train, test), then by rising id")
        seen.add(example.image_id)
        last = key
        yield example


def _sharded(folder: Path, examples: Iterable[Example]) -> Iterator[tuple[int, int, Example]]:
    """Write each example to the current shard and yield its place; a full shard is followed by a new one."""
    shard, row, size = 0, 0, 0
    pending: list[Example] = []
    writer: pa.ipc.RecordBatchFileWriter | None = None

    def flush() -> None:
        if writer is not None and pending:
            columns = [[getattr(example, field.name) for example in pending] for field in _IMAGES]
            writer.write_batch(pa.record_batch(columns, schema=_IMAGES))
            pending.clear()

    try:
        for example in examples:
            if writer is None:
                writer = pa.ipc.new_file(str(folder / f"{shard:05d}.arrow"), _IMAGES)
            pending.append(example)
            yield shard, row, example
            row, size = row + 1, size + len(example.jpeg)
            if len(pending) == BATCH_ROWS or size >= SHARD_BYTES:
                flush()
            if size >= SHARD_BYTES:
                writer.close()
                shard, row, size, writer = shard + 1, 0, 0, None
        flush()
    finally:
        if writer is not None:
            writer.close()


def _check_classes(table: pa.Table, order: tuple[str, ...]) -> None:
    """Refuse a class that nothing can teach, and a data set without a test split."""
    train = table.filter(pa.compute.equal(table["split"], "train"))
    labelled = set(train["labels"].combine_chunks().flatten().to_pylist())
    for name in order:
        if name not in labelled:
            raise BadData(f"class '{name}' has no training image; remove the class or add images of it")
    if train.num_rows == table.num_rows:
        raise BadData("the source has no test images; expected at least one")


def _counts(table: pa.Table, split: str) -> dict[str, int]:
    rows = table.filter(pa.compute.equal(table["split"], split))
    lengths = pa.compute.list_value_length(rows["labels"])
    return {"images": rows.num_rows, "labelled": pa.compute.sum(pa.compute.greater(lengths, 0)).as_py() or 0}
