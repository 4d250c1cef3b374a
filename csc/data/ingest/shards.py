"""Image shards: what a reader lists becomes Arrow files of a fixed number of images.

The listing alone tells the shard and row of every image, so that each shard is made by itself, whoever makes it. One
record batch of images is held at a time.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from csc.data.ingest.source import DamagedFile, Source
from csc.errors import BadData, CscError, Unavailable
from csc.storage import absolute, is_remote, sha256_file

__all__ = [
    "BrokenImage",
    "Encoded",
    "Images",
    "Listed",
    "Part",
    "Shard",
    "SourceImages",
    "cut_short",
    "in_parts",
    "is_whole",
    "read_ahead",
    "scaled_down",
    "write_shard",
]

JPEG_QUALITY = 90  # of images that are made smaller
BATCH_ROWS = 256
BATCH_BYTES = 64 << 20  # a batch of large images has fewer rows
READERS = 16  # requests to an object store at a time, for each worker

_SCHEMA = pa.schema([("image_id", pa.string()), ("jpeg", pa.binary()), ("width", pa.int32()), ("height", pa.int32())])
_REMEDY = "replace the file, or leave out images that cannot be used with --skip-bad"
_Asked = TypeVar("_Asked")
_Read = TypeVar("_Read")


class BrokenImage(BadData):
    """An image file that is there and can be read, and is no whole image."""


class Listed(NamedTuple):
    """One image as a reader lists it, without its bytes.

    Attributes:
        image_id: unique within the data set.
        split: `train` or `test`.
        labels: classes with at least one ordinary object.
        difficult: classes present only as objects that the benchmark sets apart (VOC difficult, COCO crowd).
        place: name of its file in the source, or whatever else tells `Images` how to get it.
    """

    image_id: str
    split: str
    labels: tuple[str, ...]
    difficult: tuple[str, ...]
    place: str


class Encoded(NamedTuple):
    """One image as it goes into a shard."""

    jpeg: bytes
    width: int
    height: int


Images = Callable[[Sequence[Listed]], Iterable[Encoded]]  # gives the images of a part of the listing, one by one


class Part(NamedTuple):
    """The part of a listing that becomes one shard.

    Attributes:
        number: of the shard.
        rows: its images.
        key: stands for all that the bytes of the shard depend on.
    """

    number: int
    rows: Sequence[Listed]
    key: str = ""


def in_parts(
    listing: Sequence[Listed], shard_rows: int, key: Callable[[Sequence[Listed]], str] = lambda rows: ""
) -> list[Part]:
    """Cut a listing into the parts that become shards."""
    starts = range(0, len(listing), shard_rows)
    cuts = (listing[start : start + shard_rows] for start in starts)
    return [Part(number, rows, key(rows)) for number, rows in enumerate(cuts)]


@dataclass(frozen=True)
class Shard:
    """A finished shard: its file, and the SHA-256 of each of its images."""

    rows: int
    bytes: int
    sha256: str
    contents: list[str]


def cut_short(reason: object) -> CscError:
    """The error for work that was stopped by something that may pass: a store, a disk, a lost process."""
    kind = type(reason) if isinstance(reason, Unavailable) else CscError
    return kind(f"{reason}; what is finished is kept, the same command goes on from there")


class SourceImages:
    """The images of a source as JPEG, each decoded once to be sure of it.

    Args:
        files: the source; a worker process opens it again.
        short_side: images with a longer short side are scaled down to it, all others kept as they are.
    """

    def __init__(self, files: Source, short_side: int | None = None) -> None:
        self.files, self.short_side = files, short_side

    @property
    def record(self) -> dict[str, Any]:
        """What the record of the source says of images that were made smaller."""
        return {} if self.short_side is None else {"short_side": self.short_side, "jpeg_quality": JPEG_QUALITY}

    def __call__(self, rows: Sequence[Listed]) -> Iterator[Encoded]:
        """Read the images of some rows."""
        return _ahead(self._image, rows, self.files)

    def broken(self, rows: Sequence[Listed]) -> dict[str, str]:
        """The ids of images that cannot be used, each with what is wrong."""
        reasons = _ahead(self._why_broken, rows, self.files)
        return {row.image_id: reason for row, reason in zip(rows, reasons, strict=True) if reason}

    def state(self, rows: Sequence[Listed]) -> str:
        """Stand for the images of some rows without reading them."""
        versions = [self.files.version(row.place) for row in rows]
        return hashlib.sha256(json.dumps([absolute(self.files.path), self.record, versions]).encode()).hexdigest()

    def _image(self, row: Listed) -> Encoded:
        try:
            content = self.files.read(row.place)
        except DamagedFile as error:
            raise BrokenImage(str(error)) from None
        except BadData as error:
            if is_remote(self.files.path):
                raise cut_short(error) from None
            raise
        image = Encoded(*checked_jpeg(content, self.files.where(row.place)))
        if self.short_side is not None and min(image.width, image.height) > self.short_side:
            return scaled_down(content, self.short_side)
        return image

    def _why_broken(self, row: Listed) -> str:
        try:
            self._image(row)
        except BrokenImage as error:
            return str(error).rpartition("; ")[0]  # without what to do about it
        return ""


def read_ahead(files: Source, names: Sequence[str]) -> Iterator[bytes]:
    """The content of one file after the other."""
    return _ahead(files.read, names, files)


def _ahead(read: Callable[[_Asked], _Read], asked: Sequence[_Asked], files: Source) -> Iterator[_Read]:
    """Read one thing after the other; an object store is asked for several at a time."""
    if not is_remote(files.path):
        yield from map(read, asked)
        return
    with ThreadPoolExecutor(READERS) as readers:
        for first in range(0, len(asked), READERS):
            yield from readers.map(read, asked[first : first + READERS])


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
            _rgb(image).save(encoded, "JPEG", quality=95)
            return encoded.getvalue(), width, height
    except UnidentifiedImageError:
        raise BrokenImage(f"{where}: broken image (no known format); {_REMEDY}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders of rare formats raise whatever comes their way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BrokenImage(f"{where}: broken image ({reason}); {_REMEDY}") from None


def _rgb(image: Image.Image) -> Image.Image:
    """An image with 8 bits to a colour; of grey in 16 bits, which Pillow alone would turn white, the upper ones."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32 bits to a pixel, and nothing tells which value is white: save it with 8 or 16")
    return image.convert("RGB")


def scaled_down(content: bytes, short_side: int) -> Encoded:
    """Scale an image down until its short side has the given length."""
    with Image.open(io.BytesIO(content)) as image:
        scale = short_side / min(image.size)
        width, height = (max(short_side, round(side * scale)) for side in image.size)
        image.draft("RGB", (2 * width, 2 * height))  # a JPEG is decoded no larger than the filter below makes use of
        small = _rgb(image).resize((width, height), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    small.save(encoded, "JPEG", quality=JPEG_QUALITY)
    return Encoded(encoded.getvalue(), width, height)


def write_shard(path: Path, rows: Sequence[Listed], images: Images) -> Shard:
    """Write the images of some rows as one Arrow file."""
    contents: list[str] = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for batch in _batches(zip(rows, images(rows), strict=True)):
            columns = [
                [row.image_id for row, _ in batch],
                *([getattr(image, field) for _, image in batch] for field in Encoded._fields),
            ]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
            contents += [hashlib.sha256(image.jpeg).hexdigest() for _, image in batch]
            batch.clear()  # before the next one fills up
    return Shard(len(rows), path.stat().st_size, sha256_file(path), contents)


def is_whole(path: Path, sha256: str) -> bool:
    """Whether there is a file of these bytes, and one that can be read."""
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False


def _batches(pairs: Iterable[tuple[Listed, Encoded]]) -> Iterator[list[tuple[Listed, Encoded]]]:
    batch: list[tuple[Listed, Encoded]] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[1].jpeg)
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
