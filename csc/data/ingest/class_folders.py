"""Images in one folder per class, as a data set.

    train/<class>/<image>, test/<class>/<image>    the test folder may also be val, valid or validation
    <class>/<image>                                the names of the images decide the split (`split_by_name`)

Every image has one label, the name of its folder. Files that are not images by their names are not looked at.
"""

import os
from pathlib import PurePosixPath

from csc.data import SUFFIXES
from csc.data.dataset import Dataset
from csc.data.ingest.images import SPLIT_BY_NAME, TEST_FOLDERS, ListedImage, split_by_name, split_folders
from csc.data.ingest.source import Source
from csc.data.ingest.writer import DEFAULTS, SourceListing, WriteOptions, write_source
from csc.errors import BadData

__all__ = ["ingest_folder"]

_SPLITS = {"train", *TEST_FOLDERS}


def ingest_folder(
    source: str | os.PathLike[str], out: str | os.PathLike[str], name: str, options: WriteOptions = DEFAULTS
) -> Dataset:
    """Write the images of class folders as a data set; an image's id is its name in the source."""
    with Source(source) as files:
        root = _root(files)
        found = files.folders(root) & _SPLITS
        record: dict[str, object] = {"kind": "folder"}
        if not found:
            record["split"] = SPLIT_BY_NAME
            listing = _listing(files, root, "")
        else:
            folders, missing = split_folders(found)
            if missing:
                raise BadData(f"{files.where(root / missing)}: no such folder; expected train/ and test/, or neither")
            if left_out := sorted(found - set(folders.values())):
                record["left_out"] = left_out
            listing = [row for split, folder in folders.items() for row in _listing(files, root / folder, split)]
        classes = sorted({label for row in listing for label in row.labels})
        if not classes:
            raise BadData(
                f"{files.path}: no images in class folders; expected <class>/<image>.jpg{files.still_packed()}"
            )
        return write_source(out, name, files, SourceListing(classes, listing, record), options)


def _root(files: Source) -> PurePosixPath:
    """The source, or the only folder in it, if that has no images: zips often have one folder around all."""
    folders = files.folders()
    inner = PurePosixPath(next(iter(folders), ""))
    is_around = len(folders) == 1 and inner.name not in _SPLITS and not _images(files, inner)
    return inner if is_around else PurePosixPath()


def _images(files: Source, folder: PurePosixPath) -> list[str]:
    names = (name for name in files.names(folder) if not name.startswith("."))
    return sorted(name for name in names if name.lower().endswith(SUFFIXES))


def _listing(files: Source, folder: PurePosixPath, split: str) -> list[ListedImage]:
    listing = []
    for label in sorted(files.folders(folder)):
        for name in _images(files, folder / label):
            file = str(folder / label / name)
            listing.append(ListedImage(file, split or split_by_name(f"{label}/{name}"), (label,), (), file))
    return listing
