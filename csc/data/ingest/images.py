"""Images to ingest: listed by a reader, read from a source, checked, and scaled down if asked for."""

import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from csc.data import FORMATS
from csc.data.ingest.source import DamagedFile, Source
from csc.errors import BadData, resumable_error
from csc.storage import absolute, json_digest

__all__ = [
    "BrokenImage",
    "Encoded",
    "ListedImage",
    "ReadImages",
    "SourceImages",
    "as_jpeg",
    "checked_jpeg",
    "read_ahead",
    "scaled_down",
    "split_by_name",
    "split_folders",
]

JPEG_QUALITY = 90  # of images that are scaled down
MOST_PIXELS = 89_478_485  # Pillow's own limit, from which on it warns
TEST_EVERY = 5
SPLIT_BY_NAME = f"by name: about one image in {TEST_EVERY} is a test image"
TEST_FOLDERS = ("test", "val", "valid", "validation")  # the first that is there is the test split
READERS = 16  # requests to an object store at a time, for each worker

_REMEDY = "replace the file, or leave out images that cannot be used with --skip-bad"
_Item = TypeVar("_Item")
_Read = TypeVar("_Read")


class BrokenImage(BadData):
    """An image file that can be read but not decoded."""


class ListedImage(NamedTuple):
    """One image as a reader lists it, without its bytes.

    Attributes:
        image_id: unique within the data set.
        split: `train` or `test`.
        labels: classes with at least one ordinary object.
        difficult: classes present only as objects that the benchmark treats specially (VOC difficult, COCO crowd).
        file: name in the source, or another text by which `ReadImages` finds the image.
    """

    image_id: str
    split: str
    labels: tuple[str, ...]
    difficult: tuple[str, ...]
    file: str


class Encoded(NamedTuple):
    """One image as it goes into a shard."""

    jpeg: bytes
    width: int
    height: int


def split_by_name(name: str) -> str:
    """The split of an image whose source does not say: about one in `TEST_EVERY` is a test image, always the same.

    >>> [split_by_name(f"{number}.jpg") for number in range(4)]
    ['train', 'test', 'train', 'train']
    """
    number = int.from_bytes(hashlib.sha256(name.encode(errors="backslashreplace")).digest()[:8], "big")
    return "test" if number % TEST_EVERY == 0 else "train"


def split_folders(folders: Collection[str]) -> tuple[dict[str, str], str]:
    """The folders of train and test among those of a source, and the name of the first that is missing, if one is.

    >>> split_folders(["train", "valid", "other"])
    ({'train': 'train', 'test': 'valid'}, '')
    """
    test = [name for name in TEST_FOLDERS if name in folders]
    if "train" not in folders:
        return {}, "train"
    return ({"train": "train", "test": test[0]}, "") if test else ({}, "test")


ReadImages = Callable[[Sequence[ListedImage]], Iterable[Encoded]]  # for some rows, one image after the other


class SourceImages:
    """The images of a source as JPEG, each decoded once as a check.

    Args:
        files: the source; a worker process opens it again.
        short_side: images with a longer short side are scaled down to it.
    """

    def __init__(self, files: Source, short_side: int | None = None) -> None:
        self.files, self.short_side = files, short_side

    @property
    def record(self) -> dict[str, Any]:
        """What the record of the source says of scaled images."""
        return {} if self.short_side is None else {"short_side": self.short_side, "jpeg_quality": JPEG_QUALITY}

    def __call__(self, rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        """Read the images of some rows."""
        return read_ahead(self._image, rows, self.files)

    def broken(self, rows: Sequence[ListedImage]) -> dict[str, str]:
        """The ids of images that cannot be used, each with the reason."""
        reasons = read_ahead(self._why_broken, rows, self.files)
        return {row.image_id: reason for row, reason in zip(rows, reasons, strict=True) if reason}

    def state(self, rows: Sequence[ListedImage]) -> str:
        """A hash that changes with the images of some rows, without reading them."""
        versions = [self.files.version(row.file) for row in rows]
        return json_digest([absolute(self.files.path), self.record, versions])

    def _image(self, row: ListedImage) -> Encoded:
        try:
            content = self.files.read(row.file)
        except DamagedFile as error:
            raise BrokenImage(str(error)) from None
        except BadData as error:
            raise resumable_error(error) if self.files.is_remote else error from None
        image = checked_jpeg(content, self.files.where(row.file))
        if self.short_side is not None and min(image.width, image.height) > self.short_side:
            return scaled_down(content, self.short_side)
        return image

    def _why_broken(self, row: ListedImage) -> str:
        try:
            self._image(row)
        except BrokenImage as error:
            return str(error).rpartition("; ")[0]  # without the remedy
        return ""


def read_ahead(read: Callable[[_Item], _Read], items: Sequence[_Item], files: Source) -> Iterator[_Read]:
    """Call `read` for each item in order; with an object store, several at a time."""
    if not files.is_remote:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(READERS) as readers:
        for first in range(0, len(items), READERS):
            yield from readers.map(read, items[first : first + READERS])


def checked_jpeg(content: bytes, where: str) -> Encoded:
    """Decode an image file once as a check; other formats are encoded as JPEG. `where` names the image in an error."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"{width} × {height} pixels, at most {MOST_PIXELS:,} are decoded")
            if image.format == "JPEG":
                image.draft("RGB", (1, 1))  # reads every byte and skips most of the arithmetic
                image.load()
                return Encoded(content, width, height)
            return Encoded(as_jpeg(_rgb(image), 95), width, height)
    except UnidentifiedImageError:
        raise BrokenImage(f"{where}: broken image (not {', '.join(FORMATS)}); {_REMEDY}") from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of any class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BrokenImage(f"{where}: broken image ({reason}); {_REMEDY}") from None


def _rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB; of 16-bit grey, which Pillow would turn white, the upper 8 bits are kept."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("32 bits to a pixel, and nothing tells which value is white: save it with 8 or 16")
    return image.convert("RGB")


def scaled_down(content: bytes, short_side: int) -> Encoded:
    """Scale an image down until its short side has the given length."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        scale = short_side / min(image.size)
        width, height = (max(short_side, round(side * scale)) for side in image.size)
        image.draft("RGB", (2 * width, 2 * height))  # decodes a JPEG no larger than the filter below needs
        small = _rgb(image).resize((width, height), Image.Resampling.LANCZOS)
    return Encoded(as_jpeg(small, JPEG_QUALITY), width, height)


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    """Encode an image."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
