"""PASCAL VOC 2007 in its official layout, as a data set: train = trainval, test = test.

    VOCdevkit/VOC2007/ImageSets/Main/trainval.txt, test.txt   one image id per line
    VOCdevkit/VOC2007/Annotations/<id>.xml                    the objects of an image
    VOCdevkit/VOC2007/JPEGImages/<id>.jpg

A class is a label of an image when at least one object of it is not flagged `difficult`. A class with difficult objects
only is neither a label nor a reason for the image to belong to the task of that class.
"""

import hashlib
import os
import xml.etree.ElementTree as ET
from pathlib import PurePosixPath

from csc.data.dataset import Dataset
from csc.data.ingest.images import Listed, read_ahead
from csc.data.ingest.source import Source
from csc.data.ingest.writer import DEFAULTS, Annotated, WriteOptions, write_source
from csc.errors import BadData

__all__ = ["VOC_CLASSES", "ingest_voc2007"]

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

_LISTS = {"train": "trainval.txt", "test": "test.txt"}
_LAYOUT = {"Annotations", "ImageSets", "JPEGImages"}


def ingest_voc2007(
    source: str | os.PathLike[str], out: str | os.PathLike[str], options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write PASCAL VOC 2007 as the data set `voc`.

    All lists and annotations are checked before anything is written; images are then read one by one.
    The width and height of an image are those of the JPEG; the XML's are not read. `skip_bad` also leaves out images
    with unusable annotations.
    """
    with Source(source) as files:
        root = _root(files)
        lists = {split: root / "ImageSets" / "Main" / name for split, name in _LISTS.items()}
        ids = {split: _read_ids(files, name) for split, name in lists.items()}
        twice = sorted(set(ids["train"]) & set(ids["test"]))
        if twice:
            raise BadData(
                f"{files.where(lists['test'])}: image '{twice[0]}' is in trainval.txt too; "
                "an image belongs to one of the two"
            )
        listing, digest, skipped = _read_annotations(files, root, ids, options.skip_bad)
        record = {
            "kind": "voc2007",
            "files": {name.name: hashlib.sha256(files.read(name)).hexdigest() for name in lists.values()},
            "annotations_sha256": digest,
        }
        return write_source(out, "voc", files, Annotated(VOC_CLASSES, listing, record, skipped=skipped), options)


def _root(files: Source) -> PurePosixPath:
    """Find the folder VOC2007: at the source itself, in VOCdevkit, or one folder deeper."""
    tops = [PurePosixPath(), *(PurePosixPath(name) for name in sorted(files.folders()))]
    for top in tops:
        for candidate in (top, top / "VOC2007", top / "VOCdevkit" / "VOC2007"):
            if files.folders(candidate) >= _LAYOUT:
                return candidate
    raise BadData(
        f"{files.path}: not a VOC 2007 layout; expected VOCdevkit/VOC2007 with the folders "
        f"JPEGImages, Annotations and ImageSets/Main{files.still_packed()}"
    )


def _read_ids(files: Source, name: PurePosixPath) -> list[str]:
    """Read the image ids of one split, in rising order."""
    where = files.where(name)
    if not files.has(name):
        raise BadData(f"{where}: no such file; expected one image id per line (trainval and test go into one VOC2007)")
    try:
        lines = files.read(name).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadData(f"{where}: not a text file ({error}); expected one image id per line") from None
    rows: dict[str, int] = {}
    for row, line in enumerate(lines, start=1):
        image_id = line.strip()
        if not image_id:
            continue
        if not image_id.replace("_", "").isalnum():
            raise BadData(f"{where}, line {row}: {image_id!r} is not an image id; expected one such as 000005 per line")
        if image_id in rows:
            raise BadData(
                f"{where}, line {row}: image '{image_id}' is listed twice (first in line {rows[image_id]}); remove one"
            )
        rows[image_id] = row
    if not rows:
        raise BadData(f"{where}: lists no image; expected one image id per line")
    return sorted(rows)


def _read_annotations(
    files: Source, root: PurePosixPath, ids: dict[str, list[str]], skip_bad: bool
) -> tuple[list[Listed], str, list[str]]:
    """List the images with their classes; return it, the SHA-256 over all annotations, and the ids left out."""
    splits = [(image_id, split) for split, image_ids in ids.items() for image_id in image_ids]
    names = [_names(files, root, image_id, _LISTS[split]) for image_id, split in splits]
    contents = read_ahead(files.read, [annotation for annotation, _ in names], files)
    digest = hashlib.sha256()
    listing, skipped = [], []
    for (image_id, split), (annotation, image), content in zip(splits, names, contents, strict=True):
        digest.update(hashlib.sha256(content).digest())
        try:
            listing.append(Listed(image_id, split, *_classes(content, files.where(annotation)), image))
        except BadData:
            if not skip_bad:
                raise
            skipped.append(image_id)
    return listing, digest.hexdigest(), skipped


def _names(files: Source, root: PurePosixPath, image_id: str, listed_in: str) -> tuple[str, str]:
    """The names of the annotation and of the image of a listed id; both must be there."""
    names = root / "Annotations" / f"{image_id}.xml", root / "JPEGImages" / f"{image_id}.jpg"
    for name in names:
        if not files.has(name):
            raise BadData(
                f"{files.where(name)}: no such file, but {listed_in} lists image '{image_id}'; "
                "add the file or remove the id"
            )
    return str(names[0]), str(names[1])


def _classes(content: bytes, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the classes of the ordinary and of the difficult objects of one annotation."""
    try:
        annotation = ET.fromstring(content)
    except (ET.ParseError, ValueError, LookupError) as error:
        raise BadData(f"{where}: not readable as XML ({error}); expected a VOC annotation") from None
    if annotation.tag != "annotation":
        raise BadData(f"{where}: the outer element is {annotation.tag!r}; expected <annotation>")
    found: dict[str, set[str]] = {"0": set(), "1": set()}
    for number, thing in enumerate(annotation.iterfind("object"), start=1):
        name = (thing.findtext("name") or "").strip()
        if not name:
            raise BadData(f"{where}: object {number} has no name; expected one of the 20 VOC classes in <name>")
        if name not in VOC_CLASSES:
            raise BadData(
                f"{where}: object {number} has the unknown class {name!r}; known are {', '.join(VOC_CLASSES)}"
            )
        difficult = (thing.findtext("difficult") or "0").strip()
        if difficult not in found:
            raise BadData(f"{where}: object {number} has difficult = {difficult!r}; expected 0 or 1")
        found[difficult].add(name)
    return tuple(sorted(found["0"])), tuple(sorted(found["1"]))
