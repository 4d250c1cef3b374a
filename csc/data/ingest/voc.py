"""PASCAL VOC, and any other set in its layout, as a data set.

    VOCdevkit/VOC2007/ImageSets/Main/trainval.txt, test.txt   one image id per line
    VOCdevkit/VOC2007/Annotations/<id>.xml                    the objects of an image
    VOCdevkit/VOC2007/JPEGImages/<id>.jpg

VOC 2007: train = trainval, test = test. Of other years the annotations of the test images are often not published: then
train = train.txt, test = val.txt.

A class is a label of an image when at least one object of it is not flagged `difficult`. A class with difficult objects
only is neither a label nor a reason for the image to belong to the task of that class.
"""

import hashlib
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import PurePosixPath

from csc.data.dataset import Dataset
from csc.data.ingest.images import ListedImage, read_ahead
from csc.data.ingest.source import Source
from csc.data.ingest.writer import DEFAULTS, SourceListing, WriteOptions, write_source
from csc.errors import BadData

__all__ = ["VOC_CLASSES", "ingest_voc"]

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip

_LAYOUT = {"Annotations", "ImageSets", "JPEGImages"}


def ingest_voc(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    name: str,
    year: str | None = None,
    options: WriteOptions = DEFAULTS,
) -> Dataset:
    """Write a set in the layout of VOC as a data set.

    All lists and annotations are checked before anything is written; images are then read one by one.
    The width and height of an image are those of the JPEG; the XML's are not read. `skip_bad` also leaves out images
    with unusable annotations.

    Args:
        source: folder, zip or `s3://` address that is, or contains, `VOCdevkit` or `VOC2007`.
        out: folder or `s3://` prefix of the data set.
        name: of the data set, as scenarios use it.
        year: of the folder; its classes must be the 20 of VOC. Without it any year is taken, with the classes it has.
        options: how it is written.
    """
    with Source(source) as files:
        root = _root(files, year)
        lists = _lists(files, root, year)
        ids = {split: _read_ids(files, file) for split, file in lists.items()}
        twice = sorted(set(ids["train"]) & set(ids["test"]))
        if twice:
            raise BadData(
                f"{files.where(lists['test'])}: image '{twice[0]}' is in {lists['train'].name} too; "
                "an image belongs to one of the two"
            )
        reader = _Reader(files, root, VOC_CLASSES if year else None, skip_bad=options.skip_bad)
        listing = reader.listing(ids, lists)
        record = {
            "kind": f"voc{year}" if year else root.name.lower() or "voc",
            "files": {file.name: hashlib.sha256(files.read(file)).hexdigest() for file in lists.values()},
            "annotations_sha256": reader.digest.hexdigest(),
        }
        classes = VOC_CLASSES if year else sorted({label for row in listing for label in row.labels})
        return write_source(out, name, files, SourceListing(classes, listing, record, skipped=reader.skipped), options)


def _root(files: Source, year: str | None) -> PurePosixPath:
    """Find the folder VOC<year>: at the source itself, in VOCdevkit, or one folder deeper."""
    pattern = re.compile(f"VOC{year or '[0-9]{4}'}")
    for top in files.tops():
        inner = [folder / name for folder in (top, top / "VOCdevkit") for name in sorted(files.folders(folder))]
        named = [folder for folder in inner if pattern.fullmatch(folder.name)]
        found = [folder for folder in (top, *named) if files.folders(folder) >= _LAYOUT]
        if len(found) > 1:
            names = ", ".join(folder.name for folder in found)
            raise BadData(f"{files.path}: several years ({names}); give the folder of one as --source")
        if found:
            return found[0]
    wanted = f"VOC {year}" if year else "VOC"
    raise BadData(
        f"{files.path}: not a {wanted} layout; expected VOCdevkit/VOC{year or '2007'} with the folders "
        f"JPEGImages, Annotations and ImageSets/Main{files.still_packed()}"
    )


def _lists(files: Source, root: PurePosixPath, year: str | None) -> dict[str, PurePosixPath]:
    """The lists of the two splits: trainval and test if the test images have annotations, else train and val."""
    folder = root / "ImageSets" / "Main"
    lists = {"train": folder / "trainval.txt", "test": folder / "test.txt"}
    if year == "2007":
        return lists
    if files.has(lists["test"]):
        first = _read_ids(files, lists["test"])[0]
        if files.has(root / "Annotations" / f"{first}.xml"):
            return lists
    return {"train": folder / "train.txt", "test": folder / "val.txt"}


def _read_ids(files: Source, file: PurePosixPath) -> list[str]:
    """Read the image ids of one split, in rising order."""
    where = files.where(file)
    if not files.has(file):
        raise BadData(
            f"{where}: no such file; expected one image id per line (the lists of both splits go into one folder)"
        )
    try:
        lines = files.read(file).decode("utf-8-sig").splitlines()
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


class _Reader:
    """Reads annotations; notes the SHA-256 over all of them, and the ids that were left out."""

    def __init__(self, files: Source, root: PurePosixPath, classes: Sequence[str] | None, *, skip_bad: bool) -> None:
        self.files, self.root, self.known, self.skip_bad = files, root, classes, skip_bad
        self.digest = hashlib.sha256()
        self.skipped: list[str] = []

    def listing(self, ids: dict[str, list[str]], lists: dict[str, PurePosixPath]) -> list[ListedImage]:
        """List the images with their classes."""
        splits = [(image_id, split) for split, image_ids in ids.items() for image_id in image_ids]
        names = [self._names(image_id, lists[split].name) for image_id, split in splits]
        contents = read_ahead(self.files.read, [annotation for annotation, _ in names], self.files)
        listing = []
        for (image_id, split), (annotation, image), content in zip(splits, names, contents, strict=True):
            self.digest.update(hashlib.sha256(content).digest())
            try:
                listing.append(
                    ListedImage(image_id, split, *self._classes(content, self.files.where(annotation)), image)
                )
            except BadData:
                if not self.skip_bad:
                    raise
                self.skipped.append(image_id)
        return listing

    def _names(self, image_id: str, listed_in: str) -> tuple[str, str]:
        """The names of the annotation and of the image of a listed id; both must be there."""
        names = self.root / "Annotations" / f"{image_id}.xml", self.root / "JPEGImages" / f"{image_id}.jpg"
        for name in names:
            if not self.files.has(name):
                raise BadData(
                    f"{self.files.where(name)}: no such file, but {listed_in} lists image '{image_id}'; "
                    "add the file or remove the id"
                )
        return str(names[0]), str(names[1])

    def _classes(self, content: bytes, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
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
                raise BadData(f"{where}: object {number} has no name; expected a class in <name>")
            if self.known is not None and name not in self.known:
                raise BadData(
                    f"{where}: object {number} has the unknown class {name!r}; known are {', '.join(self.known)}"
                )
            difficult = (thing.findtext("difficult") or "0").strip()
            if difficult not in found:
                raise BadData(f"{where}: object {number} has difficult = {difficult!r}; expected 0 or 1")
            found[difficult].add(name)
        return tuple(sorted(found["0"])), tuple(sorted(found["1"]))
