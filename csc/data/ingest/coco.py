"""MS-COCO 2014, and any other set in COCO format, as a data set.

A category is a label of an image when at least one annotation of it has `iscrowd` = 0. A category present as a crowd
region only is no label, but it still makes the image part of the task of that class, as in the published benchmark.
Images without annotations are kept, with no labels.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from csc.data.dataset import Dataset
from csc.data.ingest.coco_annotations import AnnotationFile, Annotations, read_annotations
from csc.data.ingest.images import SPLIT_BY_NAME, split_folders
from csc.data.ingest.source import Source
from csc.data.ingest.writer import DEFAULTS, SourceListing, WriteOptions, write_source
from csc.errors import BadData

__all__ = ["COCO_CLASSES", "annotation_files", "coco2014_files", "ingest_coco", "ingest_coco2014"]

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
_IN_FOLDER = "_annotations.coco.json"  # next to the images of each split, as Roboflow exports


def ingest_coco2014(
    source: str | os.PathLike[str], out: str | os.PathLike[str], options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write MS-COCO 2014 as the data set `coco`: train = train2014, test = val2014.

    The source has `train2014/`, `val2014/` and `annotations/instances_{train,val}2014.json`.
    """
    with Source(source) as files:
        read = [read_annotations(files, item) for item in coco2014_files(files)]
        for item in read:
            _check_same(item, COCO_CLASSES, files, "the 80 of COCO 2014", "use 'csc ingest coco' for another set")
        return write_source(out, "coco", files, _source_listing(read, "coco2014"), options)


def coco2014_files(files: Source) -> list[AnnotationFile]:
    """Find the two annotation files of COCO 2014."""
    root = next((top for top in files.tops() if "annotations" in files.folders(top)), None)
    if root is None:
        raise _no_layout(files)
    found = [_of_split(root, "annotations", split, name) for split, name in _COCO2014.items()]
    for item in found:
        if not files.has(item.file):
            raise BadData(
                f"{files.where(item.file)}: no such file; expected the {item.split} annotations of COCO 2014 "
                "(for another set use 'csc ingest coco')"
            )
    return found


def ingest_coco(
    source: str | os.PathLike[str], out: str | os.PathLike[str], name: str, options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write a set in COCO format, in one of the layouts that `annotation_files` knows, as a data set.

    The id of an image in the data set is its split and its number, such as `train-000000000009`, so that the numbers
    of two files may overlap.
    """
    with Source(source) as files:
        found, left_out = annotation_files(files)
        first, *others = read = [read_annotations(files, item) for item in found]
        for item in others:
            _check_same(item, first.categories, files, f"those of {first.file}", "give both files the same names")
        combined = _source_listing(read, "coco")
        if left_out:
            combined.record["left_out"] = left_out
        if found[0].split is None:
            combined.record["split"] = SPLIT_BY_NAME
        groups = frozenset.intersection(*(item.groups for item in read))
        classes = [category for category in first.categories if category not in groups]
        return write_source(out, name, files, replace(combined, classes=classes), options)


def annotation_files(files: Source) -> tuple[list[AnnotationFile], list[str]]:
    """Find the annotation files of a set, in the source or one folder deeper; and the splits that are left out.

    - `annotations/` with one file for each split: train is `instances_train*.json` or `train.json`, test is
      `instances_val*.json`, `instances_test*.json`, `val.json` or `test.json`. The images are in a folder named like
      the file (`train2014/` for `instances_train2014.json`, `train/` for `train.json`), in `images/` or in the source;
    - the same files next to the images, without `annotations/`;
    - a single JSON file in `annotations/` or in the source: `split_by_name` then splits its images;
    - `train/_annotations.coco.json` with the images next to it, and the same in `test/`; without that, in `valid/`.
    """
    for top in files.tops():
        in_folders = sorted(name for name in files.folders(top) if files.has(top / name / _IN_FOLDER))
        if in_folders:
            return _per_folder(files, top, in_folders)
        for folder in ("annotations", "."):
            names = sorted(name for name in files.names(top / folder) if name.endswith(".json"))
            if any(pattern.fullmatch(name) for pattern in _ACCEPTED.values() for name in names):
                return [_of_split(top, folder, split, _named(files, top / folder, split)) for split in _ACCEPTED], []
            if len(names) == 1:
                file = top / folder / names[0]
                return [AnnotationFile(file, None, (file.parent, top / "images", top))], []
        if "annotations" in files.folders(top):
            raise BadData(f"{files.where(top / 'annotations')}: no train annotations; expected {_EXPECTED['train']}")
    raise _no_layout(files)


def _no_layout(files: Source) -> BadData:
    return BadData(
        f"{files.path}: not a COCO layout; expected a folder 'annotations' with the JSON files of the set, one JSON "
        f"file, or train/{_IN_FOLDER} and test/{_IN_FOLDER}{files.still_packed()}"
    )


def _named(files: Source, folder: PurePosixPath, split: str) -> str:
    """Find the one annotation file of a split."""
    found = sorted(name for name in files.names(folder) if _ACCEPTED[split].fullmatch(name))
    if not found:
        raise BadData(f"{files.where(folder)}: no {split} annotations; expected {_EXPECTED[split]}")
    if len(found) > 1:
        raise BadData(
            f"{files.where(folder)}: more than one file of {split} annotations ({', '.join(found)}); keep one"
        )
    return found[0]


def _of_split(top: PurePosixPath, folder: str, split: str, name: str) -> AnnotationFile:
    named_like_it = name.removesuffix(".json").removeprefix("instances_")
    return AnnotationFile(top / folder / name, split, (top / named_like_it, top / "images", top))


def _per_folder(files: Source, top: PurePosixPath, folders: Sequence[str]) -> tuple[list[AnnotationFile], list[str]]:
    """The files of an export with one folder for each split."""
    chosen, missing = split_folders(folders)
    if missing:
        raise BadData(f"{files.where(top / missing / _IN_FOLDER)}: no such file; expected one for train and for test")
    found = [AnnotationFile(top / name / _IN_FOLDER, split, (top / name,)) for split, name in chosen.items()]
    return found, [name for name in folders if name not in chosen.values()]


def _check_same(item: Annotations, expected: Sequence[str], files: Source, whose: str, advice: str) -> None:
    """Refuse categories that are not the expected ones; name the first few on either side."""
    known, found = set(expected), set(item.categories)
    missing, extra = sorted(known - found), sorted(found - known)
    if missing or extra:
        sides = [f"{word}: {', '.join(names[:3])}" for word, names in (("missing", missing), ("extra", extra)) if names]
        raise BadData(f"{files.where(item.file)}: categories differ from {whose} ({'; '.join(sides)}); {advice}")


def _source_listing(read: Sequence[Annotations], kind: str) -> SourceListing:
    names = [item.file.name for item in read]
    if len(set(names)) < len(names):  # in one folder for each split
        names = [f"{item.file.parent.name}/{item.file.name}" for item in read]
    record = {"kind": kind, "files": {name: item.sha256 for name, item in zip(names, read, strict=True)}}
    listing = [row for item in read for row in item.listing]
    return SourceListing(read[0].categories, listing, record, difficult_is_member=True)
