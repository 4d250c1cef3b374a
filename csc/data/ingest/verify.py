"""A second reading of a COCO set, by pycocotools: every label and every membership is compared with the data set."""

import contextlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

from csc.data.dataset import Dataset
from csc.data.ingest.coco import annotation_files, coco2014_files
from csc.data.ingest.coco_annotations import AnnotationFile
from csc.data.ingest.images import split_by_name
from csc.data.ingest.source import LONGEST_TABLE, Source
from csc.errors import BadData

__all__ = ["verify_coco"]

Pairs = set[tuple[str, str]]  # the id of an image, and a class; none for the image itself


def verify_coco(dataset: Dataset, source: str | os.PathLike[str]) -> str:
    """Compare a data set with its annotation files as pycocotools reads them; return one line that says what agrees."""
    try:
        import pycocotools.coco  # noqa: F401
    except ImportError:
        raise BadData("--verify: pycocotools is not installed; run: pip install pycocotools") from None
    skipped = set(dataset.source.get("skipped", ()))
    table = dataset.labels().select(["image_id", "labels", "difficult"]).to_pylist()
    ours = _pairs((row["image_id"], row["labels"], (*row["labels"], *row["difficult"])) for row in table)
    with Source(source) as files:
        found = coco2014_files(files) if dataset.source["kind"] == "coco2014" else annotation_files(files)[0]
        theirs = _pairs(row for item in found for row in _read(files, item) if row[0] not in skipped)
    for what in ours:
        _refuse_difference(what, ours[what], theirs[what], dataset)
    images, labels, members = map(len, ours.values())
    return f"verified with pycocotools: {images:,} images, {labels:,} labels, {members:,} memberships"


def _pairs(rows: Iterable[tuple[str, Iterable[str], Iterable[str]]]) -> dict[str, Pairs]:
    """All images, their labels, and the classes whose tasks they belong to; `rows` have the three of each image."""
    images, labels, members = Pairs(), Pairs(), Pairs()
    for image_id, ordinary, any_kind in rows:
        images.add((image_id, ""))
        labels |= {(image_id, name) for name in ordinary}
        members |= {(image_id, name) for name in any_kind}
    return {"images": images, "labels": labels, "members of a class": members}


def _read(files: Source, item: AnnotationFile) -> Iterator[tuple[str, set[str], set[str]]]:
    """Of each image its id in the data set, and its classes: those with an ordinary object, and all."""
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = json.loads(files.read(item.file, LONGEST_TABLE).decode("utf-8-sig"))
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it does
        coco.createIndex()
    ordinary, any_kind = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    for category in coco.loadCats(coco.getCatIds()):
        for number in coco.getImgIds(catIds=[category["id"]]):
            any_kind[number].add(category["name"])
        for annotation in coco.loadAnns(coco.getAnnIds(catIds=[category["id"]], iscrowd=False)):
            ordinary[annotation["image_id"]].add(category["name"])
    for image in coco.loadImgs(coco.getImgIds()):
        split = item.split or split_by_name(image["file_name"])
        yield f"{split}-{image['id']:012d}", ordinary[image["id"]], any_kind[image["id"]]


def _refuse_difference(what: str, ours: Pairs, theirs: Pairs, dataset: Dataset) -> None:
    if ours != theirs:
        image_id, name = first = min(ours ^ theirs)
        shown = f"{image_id}, class '{name}'" if name else image_id
        who = "only in the data set" if first in ours else "only read by pycocotools"
        raise BadData(f"{dataset.uri}: {what} differ, first in image {shown}, {who}; remove it and ingest again")
