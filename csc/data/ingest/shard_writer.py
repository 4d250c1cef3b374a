"""Image shards: Arrow files with a fixed number of images each, written from a listing.

The listing alone decides the shard and row of every image, so any process can write any shard. One record batch of
images is in memory at a time.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from csc.data.ingest.images import Encoded, ListedImage, ReadImages
from csc.storage import sha256_file

__all__ = ["Part", "Shard", "split_listing", "write_shard"]

BATCH_ROWS = 256
BATCH_BYTES = 64 << 20  # a batch of large images has fewer rows

_SCHEMA = pa.schema([("image_id", pa.string()), ("jpeg", pa.binary()), ("width", pa.int32()), ("height", pa.int32())])


class Part(NamedTuple):
    """The part of a listing that becomes one shard.

    Attributes:
        number: of the shard.
        rows: its images.
        key: hash of all that the bytes of the shard depend on.
    """

    number: int
    rows: Sequence[ListedImage]
    key: str = ""


@dataclass(frozen=True)
class Shard:
    """A finished shard: size and SHA-256 of its file, and the SHA-256 of each of its images."""

    rows: int
    bytes: int
    sha256: str
    contents: list[str]


def split_listing(
    listing: Sequence[ListedImage], shard_rows: int, key: Callable[[Sequence[ListedImage]], str] = lambda rows: ""
) -> list[Part]:
    """Split a listing into the parts that become shards."""
    parts = (listing[start : start + shard_rows] for start in range(0, len(listing), shard_rows))
    return [Part(number, rows, key(rows)) for number, rows in enumerate(parts)]


def write_shard(path: Path, rows: Sequence[ListedImage], read_images: ReadImages) -> Shard:
    """Write the images of some rows as one Arrow file."""
    contents: list[str] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for batch in _batches(zip(rows, read_images(rows), strict=True)):
            entries = [{"image_id": row.image_id, **image._asdict()} for row, image in batch]
            writer.write_batch(pa.RecordBatch.from_pylist(entries, _SCHEMA))
            contents += [hashlib.sha256(image.jpeg).hexdigest() for _, image in batch]
            del batch, entries  # before the next one fills up
    return Shard(len(rows), path.stat().st_size, sha256_file(path), contents)


def _batches(pairs: Iterable[tuple[ListedImage, Encoded]]) -> Iterator[list[tuple[ListedImage, Encoded]]]:
    batch: list[tuple[ListedImage, Encoded]] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[1].jpeg)
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
