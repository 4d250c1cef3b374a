"""MS-COCO 2014, and any other set in COCO format, as a data set.

A category is a label of an image when at least one annotation of it has `iscrowd` = 0. A category present as a crowd
region only is no label, but it still makes the image part of the task of that class, as in the published benchmark.
Images without annotations are kept, with no labels.

An annotation file is decoded straight into the few fields that count; outlines, which are most of it, are never built.
"""

import codecs
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec

from csc.data.dataset import Dataset
from csc.data.ingest.shards import Listed, SourceImages
from csc.data.ingest.skip import without_broken
from csc.data.ingest.source import Source
from csc.data.ingest.writer import ALONE, Making, write_dataset
from csc.errors import BadData

__all__ = ["COCO_CLASSES", "Split", "ingest_coco", "ingest_coco2014", "read_split"]

COCO_CLASSES = (
    "airplane", "apple", "backpack", "banana", "baseball bat", "baseball glove", "bear", "bed", "bench", "bicycle",
    "bird", "boat", "book", "bottle", "bowl", "broccoli", "bus", "cake", "car", "carrot",
    "cat", "cell phone", "chair", "clock", "couch", "cow", "cup", "dining table", "dog", "donut",
    "elephant", "fire hydrant", "fork", "frisbee", "giraffe", "hair drier", "handbag", "horse", "hot dog", "keyboard",
    "kite", "knife", "laptop", "microwave", "motorcycle", "mouse", "orange", "oven", "parking meter", "person",
    "pizza", "potted plant", "refrigerator", "remote", "sandwich", "scissors", "sheep", "sink", "skateboard", "skis",
    "snowboard", "spoon", "sports ball", "stop sign", "suitcase", "surfboard", "teddy bear", "tennis racket", "tie",
    "toaster", "toilet", "toothbrush", "traffic light", "train", "truck", "tv", "umbrella", "vase", "wine glass",
    "zebra",
)  # fmt: skip

_COCO2014 = {"train": "instances_train2014.json", "test": "instances_val2014.json"}
_ACCEPTED = {
    "train": re.compile(r"instances_train[^/]*\.json|train\.json"),
    "test": re.compile(r"instances_(val|test)[^/]*\.json|(val|test)\.json"),
}
_EXPECTED = {
    "train": "instances_train*.json or train.json",
    "test": "instances_val*.json, instances_test*.json, val.json or test.json",
}
_TABLES = ("images", "annotations", "categories")
_WHOLE, _TEXT, _FLAG = "a whole number", "a text", "0 or 1"


class _Image(msgspec.Struct, gc=False):
    id: int
    file_name: str


class _Annotation(msgspec.Struct, gc=False):
    id: int
    image_id: int
    category_id: int
    iscrowd: int | bool = 0


class _Category(msgspec.Struct, gc=False):
    id: int
    name: str


class _File(msgspec.Struct):
    """The fields of an annotation file that are read; all others are skipped."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


class _Rows(msgspec.Struct):
    """The tables with rows as they are written, to quote a wrong one."""

    images: list[msgspec.Raw] = []
    annotations: list[msgspec.Raw] = []
    categories: list[msgspec.Raw] = []


_FIELDS = {
    "images": {"id": _WHOLE, "file_name": _TEXT},
    "annotations": {"id": _WHOLE, "image_id": _WHOLE, "category_id": _WHOLE, "iscrowd": _FLAG},
    "categories": {"id": _WHOLE, "name": _TEXT},
}
_TYPES: dict[str, tuple[type, ...]] = {_WHOLE: (int,), _TEXT: (str,), _FLAG: (int, bool)}


@dataclass(frozen=True)
class Split:
    """What one annotation file says."""

    file: PurePosixPath
    sha256: str
    categories: tuple[str, ...]
    listing: tuple[Listed, ...]


def ingest_coco2014(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    skip_bad: bool = False,
    short_side: int | None = None,
    making: Making = ALONE,
) -> Dataset:
    """Write MS-COCO 2014 as the data set `coco`: train = train2014, test = val2014.

    Args:
        source: folder, zip or `s3://` place with `train2014/`, `val2014/` and
            `annotations/instances_{train,val}2014.json`.
        out: folder or `s3://` prefix of the data set.
        skip_bad: leave out broken images instead of stopping at the first; the record of the source then names them.
        short_side: scale images down to this short side; the record of the source then says so.
        making: how many processes, and where to print how it goes.
    """
    with Source(source) as files:
        root = _root(files)
        folder = root / "annotations"
        for split, name in _COCO2014.items():
            if not files.has(folder / name):
                raise BadData(
                    f"{files.where(folder / name)}: no such file; expected the {split} annotations of COCO 2014 "
                    "(for another set use 'csc ingest coco')"
                )
        train, test = (read_split(files, root, name, split) for split, name in _COCO2014.items())
        for item in (train, test):
            _check_same(
                files.where(item.file),
                item.categories,
                COCO_CLASSES,
                "the 80 of COCO 2014",
                "use 'csc ingest coco' for another set",
            )
        return _write(train, test, SourceImages(files, short_side), out, "coco", "coco2014", skip_bad, making)


def ingest_coco(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str,
    *,
    skip_bad: bool = False,
    short_side: int | None = None,
    making: Making = ALONE,
) -> Dataset:
    """Write a set in COCO format as a data set.

    The folder `annotations/` of the source has one file for each split; another file of the same split is refused,
    because nothing tells which is meant:

    - train: `instances_train*.json` or `train.json`;
    - test: `instances_val*.json`, `instances_test*.json`, `val.json` or `test.json`.

    An image is looked for by its `file_name` in the folder named like its annotation file (`train2014/` for
    `instances_train2014.json`, `train/` for `train.json`), then in `images/`, then in the source itself.
    The id of an image in the data set is its split and its number, such as `train-000000000009`, so that two files
    which both count from one do not clash.

    Args:
        source: folder, zip or `s3://` place of the set.
        out: folder or `s3://` prefix of the data set.
        name: of the data set, as scenarios use it.
        skip_bad: leave out broken images instead of stopping at the first; the record of the source then names them.
        short_side: scale images down to this short side; the record of the source then says so.
        making: how many processes, and where to print how it goes.
    """
    with Source(source) as files:
        root = _root(files)
        chosen = {split: _choose(files, root / "annotations", split) for split in _ACCEPTED}
        train, test = (read_split(files, root, file, split) for split, file in chosen.items())
        _check_same(
            files.where(test.file),
            test.categories,
            train.categories,
            f"those of {train.file.name}",
            "give both files the same names",
        )
        return _write(train, test, SourceImages(files, short_side), out, name, "coco", skip_bad, making)


def _root(files: Source) -> PurePosixPath:
    """Find the folder that holds `annotations`: the source itself or one folder deeper."""
    for top in (PurePosixPath(), *(PurePosixPath(name) for name in sorted(files.folders()))):
        if "annotations" in files.folders(top):
            return top
    raise BadData(
        f"{files.path}: not a COCO layout; expected a folder 'annotations' with the JSON files of the set"
        f"{files.still_packed()}"
    )


def _choose(files: Source, folder: PurePosixPath, split: str) -> str:
    """Find the one annotation file of a split."""
    found = sorted(name for name in files.names(folder) if _ACCEPTED[split].fullmatch(name))
    if not found:
        raise BadData(f"{files.where(folder)}: no {split} annotations; expected {_EXPECTED[split]}")
    if len(found) > 1:
        raise BadData(
            f"{files.where(folder)}: more than one file of {split} annotations ({', '.join(found)}); keep one"
        )
    return found[0]


def read_split(files: Source, root: PurePosixPath, name: str, split: str) -> Split:
    """Read and check one annotation file; every image it lists must have a file.

    Args:
        files: the source.
        root: folder that holds `annotations`.
        name: of the annotation file.
        split: `train` or `test`.
    """
    file = root / "annotations" / name
    where, content = files.where(file), files.read(file)
    sha256 = hashlib.sha256(content).hexdigest()
    tables = _decode(content, where)
    del content  # the largest part; what is needed of it has been copied
    _check(tables, where)
    ordinary, crowded = _classes(tables, where)
    places = _places(files, root, name, tables.images, where)
    listing = []
    for image in tables.images:
        labels, crowds = ordinary[image.id], crowded.get(image.id, set())
        classes = tuple(sorted(labels)), tuple(sorted(crowds - labels))
        listing.append(Listed(f"{split}-{image.id:012d}", split, *classes, places[image.id]))
    listing.sort()  # by the id as it is written, which is not the order of numbers with more than twelve figures
    return Split(file, sha256, tuple(sorted(category.name for category in tables.categories)), tuple(listing))


def _decode(content: bytes, where: str) -> _File:
    """Decode the fields that are read of an annotation file."""
    text = memoryview(content)[len(codecs.BOM_UTF8) :] if content.startswith(codecs.BOM_UTF8) else content
    try:
        try:
            return msgspec.json.decode(text, type=_File)
        except msgspec.ValidationError as error:  # raised at once, though what follows may not even be JSON
            raise BadData(f"{where}: {_explained(str(error), text)}") from None
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where}: not readable as JSON ({error}); expected a whole COCO annotation file") from None


def _explained(error: str, text: bytes | memoryview) -> str:
    """Say what is wrong with a file that is JSON, and quote it, given the decoder's words and the place in them."""
    place = re.search(r"at `\$\.(\w+)(?:\[(\d+)\])?", error)
    if place and place[2]:
        table, row = place[1], int(place[2])
        rows = getattr(msgspec.json.decode(text, type=_Rows), table)
        return _explained_row(table, row, json.loads(bytes(rows[row])))
    if place:
        return f"key '{place[1]}' is not a list; expected an object with lists {', '.join(_TABLES)}"
    if missing := re.search(r"missing required field `(\w+)`", error):
        return f"key '{missing[1]}' is missing; expected an object with lists {', '.join(_TABLES)}"
    found = error.rpartition("got `")[2].rstrip("`")
    return f"holds a {'list' if found == 'array' else found}; expected an object with {', '.join(_TABLES)}"


def _explained_row(table: str, row: int, item: Any) -> str:
    for key, expected in _FIELDS[table].items():
        if not isinstance(item, dict) or (key not in item and expected is not _FLAG):
            return f"{table}[{row}] has no '{key}'; expected {expected}"
        if type(item.get(key, 0)) not in _TYPES[expected]:
            return f"{table}[{row}] has {key} {reprlib.repr(item[key])}; expected {expected}"
    return f"{table}[{row}] has a key twice, once with a wrong value; keep one"


def _check(tables: _File, where: str) -> None:
    """Check what types alone do not tell of images and categories."""
    for table in ("images", "categories"):
        if not getattr(tables, table):
            raise BadData(f"{where}: '{table}' is empty; expected at least one entry")
    _check_unique([image.id for image in tables.images], "images", "id", where)
    _check_unique([category.id for category in tables.categories], "categories", "id", where)
    for row, image in enumerate(tables.images):
        if image.id < 0:
            raise BadData(f"{where}: images[{row}] has id {image.id}; expected a whole number from 0")
    names = [category.name for category in tables.categories]
    _check_texts([image.file_name for image in tables.images], "images", "file_name", where)
    _check_texts(names, "categories", "name", where)
    _check_unique(names, "categories", "name", where)


def _check_unique(values: Sequence[Hashable], table: str, key: str, where: str) -> None:
    """Name the first value that comes twice."""
    if len(set(values)) < len(values):
        first: dict[Hashable, int] = {}
        for row, value in enumerate(values):
            if first.setdefault(value, row) != row:
                raise BadData(f"{where}: {table}[{row}] repeats {key} {value!r} of {table}[{first[value]}]; keep one")


def _check_texts(values: Sequence[str], table: str, key: str, where: str) -> None:
    for row, value in enumerate(values):
        if not value or value != value.strip() or not value.isprintable():
            raise BadData(
                f"{where}: {table}[{row}] has {key} {value!r}; expected a text that is not empty, in one line, "
                "without spaces around it"
            )


def _classes(tables: _File, where: str) -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """The classes of each image with an ordinary object, and, where there are any, those with a crowd region."""
    names = {category.id: category.name for category in tables.categories}
    ordinary: dict[int, set[str]] = {image.id: set() for image in tables.images}
    crowded: dict[int, set[str]] = {}
    for row, item in enumerate(tables.annotations):
        for key, value, known, table in (
            ("image_id", item.image_id, ordinary, "images"),
            ("category_id", item.category_id, names, "categories"),
        ):
            if value not in known:
                raise BadData(
                    f"{where}: annotations[{row}] has {key} {value}, which is not in '{table}'; "
                    "remove one or add the other"
                )
        if item.iscrowd not in (0, 1):
            raise BadData(f"{where}: annotations[{row}] has iscrowd {item.iscrowd}; expected {_FLAG}")
        classes = crowded.setdefault(item.image_id, set()) if item.iscrowd else ordinary[item.image_id]
        classes.add(names[item.category_id])
    return ordinary, crowded


def _places(files: Source, root: PurePosixPath, name: str, images: Sequence[_Image], where: str) -> dict[int, str]:
    """The file of each image, by its number."""
    folder = name.removesuffix(".json").removeprefix("instances_")
    candidates = [(place, files.names(place)) for place in (root / folder, root / "images", root)]
    places = {}
    for image in images:
        simple = "/" not in image.file_name
        for place, names in candidates:
            if image.file_name in names if simple else files.has(place / image.file_name):
                places[image.id] = f"{place}/{image.file_name}"
                break
        else:
            raise BadData(f"{where}: image {image.id}: {_missing(files, root, folder, image.file_name)}")
    return places


def _missing(files: Source, root: PurePosixPath, folder: str, file_name: str) -> str:
    """Say that an image is not there; without any folder of images, it is not the only one."""
    advice = "add the file or remove the entry"
    if not files.folders(root) & {folder, "images"}:
        advice = f"put {folder}/ there, or give a folder that has the zip files of images and annotations side by side"
    return f"no file {file_name!r} in {folder}/, images/ or beside annotations/; {advice}{files.still_packed()}"


def _check_same(where: str, categories: Sequence[str], expected: Sequence[str], whose: str, advice: str) -> None:
    """Refuse categories that are not the expected ones; name the first few on either side."""
    if set(categories) != set(expected):
        missing, extra = sorted(set(expected) - set(categories)), sorted(set(categories) - set(expected))
        sides = [f"{word}: {', '.join(names[:3])}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise BadData(f"{where}: categories differ from {whose} ({'; '.join(sides)}); {advice}")


def _write(
    train: Split,
    test: Split,
    images: SourceImages,
    out: str | os.PathLike[str],
    name: str,
    kind: str,
    skip_bad: bool,
    making: Making,
) -> Dataset:
    listing, skipped = [*train.listing, *test.listing], list[str]()
    if skip_bad:
        listing, skipped = without_broken(listing, images, making)
    record = {
        "kind": kind,
        "files": {item.file.name: item.sha256 for item in (train, test)},
        **({"skipped": skipped} if skipped else {}),
        **images.record,
    }
    return write_dataset(
        out,
        name,
        train.categories,
        listing,
        images,
        record,
        difficult_is_member=True,
        state=images.state,
        making=making,
    )
