"""One annotation file in COCO format: read and check it.

The file is decoded straight into the few fields that are used; outlines, which are most of it, are never built.
"""

import codecs
import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np

from csc.data.ingest.images import ListedImage, split_by_name
from csc.data.ingest.source import LONGEST_TABLE, Source
from csc.errors import BadData, explained
from csc.storage import each_key_once

__all__ = ["AnnotationFile", "Annotations", "read_annotations"]

_TABLES = ("images", "annotations", "categories")


class AnnotationFile(NamedTuple):
    """Where one annotation file is.

    Attributes:
        file: its name in the source.
        split: `train` or `test`; none if it has both, then the names of its images decide.
        folders: where its images are looked for, one after the other.
    """

    file: PurePosixPath
    split: str | None
    folders: tuple[PurePosixPath, ...]


@dataclass(frozen=True)
class Annotations:
    """The content of one annotation file.

    Attributes:
        groups: categories that only group others, as some tools export them: their parents, with no annotation.
    """

    file: PurePosixPath
    sha256: str
    categories: tuple[str, ...]
    groups: frozenset[str]
    listing: tuple[ListedImage, ...]


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
    supercategory: Any = None


class _File(msgspec.Struct):
    """The fields that are read; all others are skipped."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_annotations(files: Source, source_file: AnnotationFile) -> Annotations:
    """Read and check one annotation file; every image it lists must have a file."""
    where, content = files.where(source_file.file), files.read(source_file.file, LONGEST_TABLE)
    sha256 = hashlib.sha256(content).hexdigest()
    tables = _decode(content, where)
    del content  # frees the memory; what is needed of it has been copied
    _check(tables, where)
    ordinary, crowded = _classes(tables, where)
    image_files = _image_files(files, source_file, tables.images, where)
    listing = []
    for image in tables.images:
        labels, crowds = ordinary[image.id], crowded.get(image.id, set())
        classes = tuple(sorted(labels)), tuple(sorted(crowds - labels))
        split = source_file.split or split_by_name(image.file_name)
        listing.append(ListedImage(f"{split}-{image.id:012d}", split, *classes, image_files[image.id]))
    names = [category.name for category in tables.categories]
    parents = {category.supercategory for category in tables.categories if category.supercategory != category.name}
    used = set().union(*ordinary.values(), *crowded.values())
    groups = frozenset(name for name in names if name in parents and name not in used)
    return Annotations(source_file.file, sha256, tuple(sorted(names)), groups, tuple(listing))


def _decode(content: bytes, where: str) -> _File:
    """Decode the fields that are read."""
    text = memoryview(content)[len(codecs.BOM_UTF8) :] if content.startswith(codecs.BOM_UTF8) else content
    try:
        tables = msgspec.json.decode(text, type=_File)
        _check_keys(content, text, tables)
        return tables
    except msgspec.ValidationError as error:
        raise BadData(f"{where}: {explained(error)}; expected COCO format with lists {', '.join(_TABLES)}") from None
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where}: not readable as JSON ({error}); expected a complete COCO annotation file") from None


def _check_keys(content: bytes, text: bytes | memoryview, tables: _File) -> None:
    """Raise ValueError for a key that one object has twice.

    The decoder does not tell. Keys are counted in the bytes of each table, which takes a fraction of its time; only a
    table that has more of them than objects is read again, object by object.
    """
    found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])  # not decoded: where each table is in the file
    spans = []
    for table, kind in zip(_TABLES, (_Image, _Annotation, _Category), strict=True):
        raw, objects = memoryview(found[table]), getattr(tables, table)
        start = _address(raw) - _address(content)  # it is a part of the content, not a copy
        spans.append((start, start + len(raw)))
        if any(content.count(f'"{key}"'.encode(), *spans[-1]) > len(objects) for key in kind.__struct_fields__):
            for row, item in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
                json.loads(bytes(item), object_pairs_hook=_each_key_once_in(f"{table}[{row}]"))
    edges = [len(content) - len(text), *(edge for span in sorted(spans) for edge in span), len(content)]
    rest = b"0".join(content[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    json.loads(rest, object_pairs_hook=_each_key_once_in("the file"))


def _address(buffer: bytes | memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def _each_key_once_in(where: str) -> partial[dict[str, Any]]:
    return partial(each_key_once, problem=f"{where} has the key {{!r}} twice")


def _check(tables: _File, where: str) -> None:
    """Check what the types do not: images and categories that are empty, repeated or have unusable names."""
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
    """Refuse a value that appears twice."""
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
    """The classes of each image with an ordinary object, and of some images those with a crowd region."""
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
            raise BadData(f"{where}: annotations[{row}] has iscrowd {item.iscrowd}; expected 0 or 1")
        classes = crowded.setdefault(item.image_id, set()) if item.iscrowd else ordinary[item.image_id]
        classes.add(names[item.category_id])
    return ordinary, crowded


def _image_files(files: Source, source_file: AnnotationFile, images: Sequence[_Image], where: str) -> dict[int, str]:
    """The file of each image, by its number."""
    candidates = [(folder, files.names(folder)) for folder in source_file.folders]
    image_files = {}
    for image in images:
        simple = "/" not in image.file_name
        for folder, names in candidates:
            if image.file_name in names if simple else files.has(folder / image.file_name):
                image_files[image.id] = f"{folder}/{image.file_name}"
                break
        else:
            raise BadData(f"{where}: image {image.id}: {_missing(files, source_file, image.file_name)}")
    return image_files


def _missing(files: Source, source_file: AnnotationFile, file_name: str) -> str:
    """Say that an image is missing; if there is no folder of images, so are all others."""
    *inner, outer = source_file.folders
    advice = "add the file or remove the entry"
    if inner and not files.folders(outer) & {folder.name for folder in inner}:
        advice = f"put {inner[0].name}/ there, or give a folder with the zip files of images and annotations"
    folders = " or ".join(f"{folder}/" if folder.name else "the source itself" for folder in source_file.folders)
    return f"no file {file_name!r} in {folders}; {advice}{files.still_packed()}"
