"""Image shards: what a reader lists becomes Arrow files of a fixed number of images, made in one or several processes.

The listing alone tells the shard and row of every image, so that each shard is made by itself: any number of workers
gives the same bytes. A worker holds one record batch of images at a time.
"""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from PIL import Image, UnidentifiedImageError

from csc.data.source import Source
from csc.errors import BadData, CscError
from csc.storage import is_remote, sha256_file, version_of, versions_below

__all__ = [
    "Encoded",
    "Images",
    "Listed",
    "Shard",
    "SourceImages",
    "cut_short",
    "for_each_shard",
    "read_ahead",
    "scaled_down",
    "write_shard",
]

JPEG_QUALITY = 90  # of images that are made smaller
BATCH_ROWS = 256
BATCH_BYTES = 64 << 20  # a batch of large images has fewer rows
READERS = 16  # requests to an object store at a time, for each worker

_SCHEMA = pa.schema([("image_id", pa.string()), ("jpeg", pa.binary()), ("width", pa.int32()), ("height", pa.int32())])
_Made = TypeVar("_Made")


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


@dataclass(frozen=True)
class Shard:
    """A finished shard: its file, and the SHA-256 of each of its images."""

    rows: int
    bytes: int
    sha256: str
    contents: list[str]


def cut_short(reason: object) -> CscError:
    """The error for work that was stopped by something that may pass: a store, a disk, a lost process."""
    return CscError(f"{reason}; what is finished is kept, the same command goes on from there")


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
        names = [row.place for row in rows]
        contents = read_ahead(self.files, names)
        for name in names:
            try:
                content = next(contents)
            except BadData as error:
                if is_remote(self.files.path):
                    raise cut_short(error) from None
                raise
            image = Encoded(*checked_jpeg(content, self.files.where(name)))
            if self.short_side is not None and min(image.width, image.height) > self.short_side:
                image = scaled_down(content, self.short_side)
            yield image

    def state(self, rows: Sequence[Listed]) -> str:
        """Stand for the images without reading them: a hash of where they are, their sizes and times of change.

        In a bucket ETags stand for the times.
        """
        facts: list[Any]
        if is_remote(self.files.path):
            place = str(self.files.path)
            facts = [version_of(place)] if place.lower().endswith(".zip") else list(versions_below(place))
        else:
            path = Path(self.files.path).absolute()
            paths = [path] if path.is_file() else [path / row.place for row in rows]
            place, facts = str(path), [_size_and_time(name) for name in paths]
        return hashlib.sha256(json.dumps([place, facts]).encode()).hexdigest()


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0  # reading it will tell why
    return stat.st_size, stat.st_mtime_ns


def read_ahead(files: Source, names: Sequence[str]) -> Iterator[bytes]:
    """The content of one file after the other; an object store is asked for several at a time."""
    if not is_remote(files.path):
        yield from map(files.read, names)
        return
    with ThreadPoolExecutor(READERS) as readers:
        for first in range(0, len(names), READERS):
            yield from readers.map(files.read, names[first : first + READERS])


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


def scaled_down(content: bytes, short_side: int) -> Encoded:
    """Scale an image down until its short side has the given length."""
    with Image.open(io.BytesIO(content)) as image:
        scale = short_side / min(image.size)
        width, height = (max(short_side, round(side * scale)) for side in image.size)
        image.draft("RGB", (2 * width, 2 * height))  # a JPEG is decoded no larger than the filter below makes use of
        small = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
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


def for_each_shard(
    work: Callable[[Images, int, Sequence[Listed]], _Made],
    images: Images,
    shards: Mapping[int, Sequence[Listed]],
    workers: int,
) -> Iterator[_Made]:
    """Do a piece of work for every shard; yield the results in the order of the shards.

    The first shard in that order that fails is the one whose error is raised, whoever finished first.

    Args:
        work: takes the images, the number of a shard and its rows; a function that other processes can import.
        images: where the images come from.
        shards: number and rows of each.
        workers: how many processes; no more are started than there are shards, and none for a single one.
    """
    count = min(workers, len(shards))
    if count <= 1:
        for number, rows in shards.items():
            yield work(images, number, rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(images,)) as pool:
        pending = [pool.submit(_work, work, number, rows) for number, rows in shards.items()]
        try:
            for future in pending:
                yield future.result()
        except BrokenProcessPool:
            raise cut_short("a worker process was lost (memory may be short: try fewer --workers)") from None
        finally:
            pool.shutdown(cancel_futures=True)


_images: Images  # of a worker process


def _start_worker(images: Images) -> None:
    global _images
    _images = images
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A first process that is killed leaves no workers behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(work: Callable[[Images, int, Sequence[Listed]], _Made], number: int, rows: Sequence[Listed]) -> _Made:
    return work(_images, number, rows)
