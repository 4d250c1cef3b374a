"""MS-COCO 2014, and any other set in COCO format, as a data set.

A category is a label of an image when at least one annotation of it has `iscrowd` = 0. A category present as a crowd
region only is no label, but it still makes the image part of the task of that class, as in the published benchmark.
Images without annotations are kept, with no labels.
"""

import os
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from csc.data.dataset import Dataset
from csc.data.ingest.coco_annotations import Annotations, read_annotations
from csc.data.ingest.source import Source
from csc.data.ingest.writer import DEFAULTS, Annotated, WriteOptions, write_source
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


def ingest_coco2014(
    source: str | os.PathLike[str], out: str | os.PathLike[str], options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write MS-COCO 2014 as the data set `coco`: train = train2014, test = val2014.

    The source has `train2014/`, `val2014/` and `annotations/instances_{train,val}2014.json`.
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
        train, test = (read_annotations(files, root, name, split) for split, name in _COCO2014.items())
        for item in (train, test):
            _check_same(item, COCO_CLASSES, files, "the 80 of COCO 2014", "use 'csc ingest coco' for another set")
        return write_source(out, "coco", files, _annotated(train, test, "coco2014"), options)


def ingest_coco(
    source: str | os.PathLike[str], out: str | os.PathLike[str], name: str, options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write a set in COCO format as a data set.

    The folder `annotations/` of the source must have exactly one file for each split:

    - train: `instances_train*.json` or `train.json`;
    - test: `instances_val*.json`, `instances_test*.json`, `val.json` or `test.json`.

    An image is looked for by its `file_name` in the folder named like its annotation file (`train2014/` for
    `instances_train2014.json`, `train/` for `train.json`), then in `images/`, then in the source itself.
    The id of an image in the data set is its split and its number, such as `train-000000000009`, so that the numbers
    of two files may overlap.

    Args:
        source: folder, zip or `s3://` address of the set.
        out: folder or `s3://` prefix of the data set.
        name: of the data set, as scenarios use it.
        options: how it is written.
    """
    with Source(source) as files:
        root = _root(files)
        names = {split: _annotation_file(files, root / "annotations", split) for split in _ACCEPTED}
        train, test = (read_annotations(files, root, name, split) for split, name in names.items())
        _check_same(test, train.categories, files, f"those of {train.file.name}", "give both files the same names")
        return write_source(out, name, files, _annotated(train, test, "coco"), options)


def _root(files: Source) -> PurePosixPath:
    """Find the folder that contains `annotations`: the source itself or one folder deeper."""
    for top in (PurePosixPath(), *(PurePosixPath(name) for name in sorted(files.folders()))):
        if "annotations" in files.folders(top):
            return top
    raise BadData(
        f"{files.path}: not a COCO layout; expected a folder 'annotations' with the JSON files of the set"
        f"{files.still_packed()}"
    )


def _annotation_file(files: Source, folder: PurePosixPath, split: str) -> str:
    """Find the one annotation file of a split."""
    found = sorted(name for name in files.names(folder) if _ACCEPTED[split].fullmatch(name))
    if not found:
        raise BadData(f"{files.where(folder)}: no {split} annotations; expected {_EXPECTED[split]}")
    if len(found) > 1:
        raise BadData(
            f"{files.where(folder)}: more than one file of {split} annotations ({', '.join(found)}); keep one"
        )
    return found[0]


def _check_same(item: Annotations, expected: Sequence[str], files: Source, whose: str, advice: str) -> None:
    """Refuse categories that are not the expected ones; name the first few on either side."""
    known, found = set(expected), set(item.categories)
    missing, extra = sorted(known - found), sorted(found - known)
    if missing or extra:
        sides = [f"{word}: {', '.join(names[:3])}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise BadData(f"{files.where(item.file)}: categories differ from {whose} ({'; '.join(sides)}); {advice}")


def _annotated(train: Annotations, test: Annotations, kind: str) -> Annotated:
    record = {"kind": kind, "files": {item.file.name: item.sha256 for item in (train, test)}}
    return Annotated(train.categories, [*train.listing, *test.listing], record, difficult_is_member=True)
