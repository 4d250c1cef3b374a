"""MS-COCO 2014, and any other set in COCO format, as a data set.

A category is a label of an image when at least one annotation of it has `iscrowd` = 0. A category present as a crowd
region only is no label, but it still makes the image part of the task of that class, as in the published benchmark.
Images without annotations are kept, with no labels.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import reprlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from csc.data.dataset import Dataset, Example, checked_jpeg, write_dataset
from csc.data.source import Source
from csc.errors import BadData

__all__ = ["COCO_CLASSES", "ingest_coco", "ingest_coco2014"]

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
_KINDS = {int: "a whole number", str: "a text"}


@dataclass(frozen=True)
class _Listed:
    """One image of an annotation file, with its classes and the place of its file."""

    image_id: str
    split: str
    labels: tuple[str, ...]
    difficult: tuple[str, ...]
    file: PurePosixPath


@dataclass(frozen=True)
class _Annotations:
    """What one annotation file says."""

    file: PurePosixPath
    sha256: str
    categories: tuple[str, ...]
    images: tuple[_Listed, ...]


def ingest_coco2014(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> Dataset:
    """Write MS-COCO 2014 as the data set `coco`: train = train2014, test = val2014.

    Args:
        source: folder or zip with `train2014/`, `val2014/` and `annotations/instances_{train,val}2014.json`.
        out: folder of the data set.
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
        annotations = {split: _read(files, root, name, split) for split, name in _COCO2014.items()}
        for item in annotations.values():
            _check_same(
                files.where(item.file),
                item.categories,
                COCO_CLASSES,
                "the 80 of COCO 2014",
                "use 'csc ingest coco' for another set",
            )
        return _write(files, annotations, out, "coco", "coco2014")


def ingest_coco(source: str | os.PathLike[str], out: str | os.PathLike[str], name: str) -> Dataset:
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
        source: folder or zip of the set.
        out: folder of the data set.
        name: of the data set, as scenarios use it.
    """
    with Source(source) as files:
        root = _root(files)
        chosen = {split: _choose(files, root / "annotations", split) for split in _ACCEPTED}
        annotations = {split: _read(files, root, file, split) for split, file in chosen.items()}
        return _write(files, annotations, out, name, "coco")


def _root(files: Source) -> PurePosixPath:
    """Find the folder that holds `annotations`: the source itself or one folder deeper."""
    for top in (PurePosixPath(), *(PurePosixPath(name) for name in sorted(files.folders()))):
        if "annotations" in files.folders(top):
            return top
    raise BadData(f"{files.path}: not a COCO layout; expected a folder 'annotations' with the JSON files of the set")


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


def _read(files: Source, root: PurePosixPath, name: str, split: str) -> _Annotations:
    """Read and check one annotation file; every image it lists must have a file."""
    file = root / "annotations" / name
    where, content = files.where(file), files.read(file)
    tables = _parse(content, where)
    _check(tables, where)
    index = _index(tables)
    names = {number: category["name"] for number, category in index.cats.items()}
    folder = name.removesuffix(".json").removeprefix("instances_")
    places = (root / folder, root / "images", root)
    images = []
    for number, image in index.imgs.items():
        candidates = (place / image["file_name"] for place in places)
        found = next((path for path in candidates if files.has(path)), None)
        if found is None:
            raise BadData(
                f"{where}: image {number}: no file {image['file_name']!r} in {folder}/, images/ or beside "
                "annotations/; add the file or remove the entry"
            )
        annotations = index.imgToAnns.get(number, ())
        present = {names[item["category_id"]] for item in annotations}
        labels = {names[item["category_id"]] for item in annotations if not item.get("iscrowd", 0)}
        classes = tuple(sorted(labels)), tuple(sorted(present - labels))
        images.append(_Listed(f"{split}-{number:012d}", split, *classes, found))
    images.sort(key=lambda image: image.image_id)
    return _Annotations(file, hashlib.sha256(content).hexdigest(), tuple(sorted(names.values())), tuple(images))


def _parse(content: bytes, where: str) -> dict[str, list[Any]]:
    """Parse an annotation file into its three tables."""

    def without_outline(item: dict[str, Any]) -> dict[str, Any]:
        item.pop("segmentation", None)  # most of the file, and nothing here needs it: parsed, then dropped at once
        return item

    try:
        parsed = json.loads(content, object_hook=without_outline)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where}: not readable as JSON ({error}); expected a whole COCO annotation file") from None
    if not isinstance(parsed, dict):
        raise BadData(f"{where}: holds a {type(parsed).__name__}; expected an object with {', '.join(_TABLES)}")
    for table in _TABLES:
        if not isinstance(parsed.get(table), list):
            wrong = "is not a list" if table in parsed else "is missing"
            raise BadData(f"{where}: key '{table}' {wrong}; expected an object with lists {', '.join(_TABLES)}")
    return {table: parsed[table] for table in _TABLES}


def _check(tables: dict[str, list[Any]], where: str) -> None:
    """Check every field that is read later, column by column: a large set has half a million annotations."""
    for table in ("images", "categories"):
        if not tables[table]:
            raise BadData(f"{where}: '{table}' is empty; expected at least one entry")
    images = _unique(_column(tables, "images", "id", int, where), "images", "id", where)
    files = _column(tables, "images", "file_name", str, where)
    categories = _unique(_column(tables, "categories", "id", int, where), "categories", "id", where)
    names = _column(tables, "categories", "name", str, where)
    for row, number in enumerate(tables["images"]):
        if number["id"] < 0:
            raise BadData(f"{where}: images[{row}] has id {number['id']}; expected a whole number from 0")
    _check_texts(files, "images", "file_name", where)
    _check_texts(names, "categories", "name", where)
    _unique(names, "categories", "name", where)
    _column(tables, "annotations", "id", int, where)
    for key, known, table in (("image_id", images, "images"), ("category_id", categories, "categories")):
        values = _column(tables, "annotations", key, int, where)
        if not known.issuperset(values):
            row, value = next((row, value) for row, value in enumerate(values) if value not in known)
            raise BadData(
                f"{where}: annotations[{row}] has {key} {value}, which is not in '{table}'; remove one or add the other"
            )
    for row, item in enumerate(tables["annotations"]):
        if item.get("iscrowd", 0) not in (0, 1):
            raise BadData(f"{where}: annotations[{row}] has iscrowd {reprlib.repr(item['iscrowd'])}; expected 0 or 1")


def _column(tables: dict[str, list[Any]], table: str, key: str, kind: type, where: str) -> list[Any]:
    """Return one field of all rows of a table, all of one type; the first row that is wrong is named."""
    rows = tables[table]
    with contextlib.suppress(KeyError, TypeError, IndexError):
        values = [row[key] for row in rows]
        if {type(value) for value in values} <= {kind}:
            return values
    for row, item in enumerate(rows):
        if not isinstance(item, dict) or key not in item:
            raise BadData(f"{where}: {table}[{row}] has no '{key}'; expected {_KINDS[kind]}")
        if type(item[key]) is not kind:
            raise BadData(f"{where}: {table}[{row}] has {key} {reprlib.repr(item[key])}; expected {_KINDS[kind]}")
    raise AssertionError("unreachable: some row is wrong")


def _unique(values: Sequence[Hashable], table: str, key: str, where: str) -> set[Any]:
    """Return the values as a set; the first one that comes twice is named."""
    known = set(values)
    if len(known) < len(values):
        first: dict[Hashable, int] = {}
        for row, value in enumerate(values):
            if first.setdefault(value, row) != row:
                raise BadData(f"{where}: {table}[{row}] repeats {key} {value!r} of {table}[{first[value]}]; keep one")
    return known


def _check_texts(values: Sequence[str], table: str, key: str, where: str) -> None:
    for row, value in enumerate(values):
        if not value or value != value.strip() or not value.isprintable():
            raise BadData(
                f"{where}: {table}[{row}] has {key} {value!r}; expected a text that is not empty, in one line, "
                "without spaces around it"
            )


def _index(tables: dict[str, list[Any]]) -> Any:
    """Index the tables with pycocotools, in silence."""
    from pycocotools.coco import COCO  # here, so that the class names can be had where pycocotools is not installed

    with contextlib.redirect_stdout(io.StringIO()):
        index = COCO()
        index.dataset = tables
        index.createIndex()
    return index


def _check_same(where: str, categories: Sequence[str], expected: Sequence[str], whose: str, advice: str) -> None:
    """Refuse categories that are not the expected ones; name the first few on either side."""
    if set(categories) != set(expected):
        missing, extra = sorted(set(expected) - set(categories)), sorted(set(categories) - set(expected))
        sides = [f"{word}: {', '.join(names[:3])}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise BadData(f"{where}: categories differ from {whose} ({'; '.join(sides)}); {advice}")


def _write(
    files: Source, annotations: dict[str, _Annotations], out: str | os.PathLike[str], name: str, kind: str
) -> Dataset:
    train, test = annotations["train"], annotations["test"]
    _check_same(
        files.where(test.file),
        test.categories,
        train.categories,
        f"those of {train.file.name}",
        "give both files the same names",
    )
    record = {"kind": kind, "files": {item.file.name: item.sha256 for item in (train, test)}}
    examples = _examples(files, (*train.images, *test.images))
    return write_dataset(os.fspath(out), name, train.categories, examples, record, difficult_is_member=True)


def _examples(files: Source, images: Sequence[_Listed]) -> Iterator[Example]:
    """Read one image after the other."""
    for image in images:
        jpeg, width, height = checked_jpeg(files.read(image.file), files.where(image.file))
        yield Example(image.image_id, image.split, image.labels, image.difficult, jpeg, width, height)
