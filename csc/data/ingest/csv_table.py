"""Images and their labels in a CSV file, as a data set.

    image,labels,split
    photos/1.jpg,cat;dog,train
    photos/2.jpg,,test

`labels` are separated by semicolons; none is allowed. Without the column `split`, the names of the images decide
(`split_by_name`). Images are named from the folder of the CSV file.
"""

import csv
import hashlib
import io
import os
from pathlib import PurePosixPath

from csc.data.dataset import SPLITS, Dataset
from csc.data.ingest.images import SPLIT_BY_NAME, ListedImage, split_by_name
from csc.data.ingest.source import LONGEST_TABLE, Source
from csc.data.ingest.writer import DEFAULTS, SourceListing, WriteOptions, write_source
from csc.errors import BadData

__all__ = ["ingest_csv"]

_HEADERS = (["image", "labels"], ["image", "labels", "split"])


def ingest_csv(
    source: str | os.PathLike[str], out: str | os.PathLike[str], name: str, options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write the images that the only CSV file of a source lists as a data set; an image's id is its name there."""
    with Source(source) as files:
        file = _only_table(files)
        content = files.read(file, LONGEST_TABLE)
        header, *rows = _rows(content, files.where(file))
        listing = _listing(files, file, header, rows)
        record = {"kind": "csv", "files": {file.name: hashlib.sha256(content).hexdigest()}}
        if len(header) == 2:
            record["split"] = SPLIT_BY_NAME
        classes = {label for row in listing for label in row.labels}
        return write_source(out, name, files, SourceListing(sorted(classes), listing, record), options)


def _only_table(files: Source) -> PurePosixPath:
    """Find the CSV file: in the source, or one folder deeper."""
    for top in files.tops():
        found = sorted(name for name in files.names(top) if name.lower().endswith(".csv"))
        if len(found) > 1:
            raise BadData(f"{files.where(top)}: more than one CSV file ({', '.join(found)}); keep one")
        if found:
            return top / found[0]
    raise BadData(f"{files.path}: no CSV file; expected one with the columns image,labels{files.still_packed()}")


def _rows(content: bytes, where: str) -> list[list[str]]:
    """All rows, empty ones included; the first is the header, which is checked."""
    try:
        rows = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadData(
            f"{where}: not readable as CSV ({error}); expected UTF-8 text with columns image,labels"
        ) from None
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if header not in _HEADERS:
        raise BadData(
            f"{where}: the first line is {','.join(header)[:80]!r}; expected 'image,labels' or 'image,labels,split'"
        )
    return rows


def _listing(files: Source, file: PurePosixPath, header: list[str], rows: list[list[str]]) -> list[ListedImage]:
    where = files.where(file)
    listing: dict[str, ListedImage] = {}
    for number, row in enumerate(rows, start=2):
        if not any(row):
            continue
        if len(row) != len(header):
            raise BadData(f"{where}, row {number}: {len(row)} cells; expected {len(header)} ({','.join(header)})")
        image, labels, *split = (cell.strip() for cell in row)
        if image in listing:
            raise BadData(f"{where}, row {number}: image {image!r} is listed twice; put all its labels into one row")
        if not files.has(file.parent / image):
            raise BadData(f"{where}, row {number}: no file {image!r} next to the CSV file; add it or remove the row")
        if split and split[0] not in SPLITS:
            raise BadData(f"{where}, row {number}: split is {split[0]!r}; expected train or test")
        chosen = split[0] if split else split_by_name(image)
        names = tuple(label.strip() for label in labels.split(";") if label.strip())
        listing[image] = ListedImage(image, chosen, names, (), str(file.parent / image))
    return list(listing.values())
