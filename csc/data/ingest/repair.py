"""Damaged shards of a finished data set: find them and write them again."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from csc.data.dataset import Dataset
from csc.data.ingest.shards import Images, Part, has_sha256, write_shard
from csc.data.ingest.workers import for_each_part
from csc.errors import BadData, Unavailable
from csc.storage import atomic_output, is_remote, join, list_below, local_path, read_json

__all__ = ["is_undamaged", "repair"]


def repair(dataset: Dataset, parts: Sequence[Part], images: Images, workers: int) -> Iterator[str]:
    """Write shards again that are missing or differ from the index of the data set; yield the name of each.

    Args:
        dataset: whose images are known to be those of the source.
        parts: what its shards are made from.
        images: where the images come from.
        workers: processes that write shards.
    """
    index = _index(dataset)
    damaged = _damaged(dataset, index)
    if damaged and [entry["rows"] for entry in index] != [len(part.rows) for part in parts]:
        raise _beyond_repair(dataset, _file(dataset, damaged[0]))  # it has another number of rows per shard
    work = functools.partial(_write_again, dataset, {number: index[number]["sha256"] for number in damaged})
    yield from for_each_part(work, images, [parts[number] for number in damaged], workers)


def is_undamaged(dataset: Dataset) -> bool:
    """Whether there is nothing to repair."""
    return not _damaged(dataset, _index(dataset))


def _file(dataset: Dataset, number: int) -> str:
    return join(dataset.images, f"{number:05d}.arrow")


def _index(dataset: Dataset) -> Any:
    """Rows, bytes and SHA-256 of every shard."""
    file = join(dataset.images, "index.json")
    try:
        index = read_json(file)
        for entry in index:
            int(entry["rows"]), int(entry["bytes"]), str(entry["sha256"])
    except Unavailable:
        raise
    except (BadData, TypeError, KeyError, ValueError):
        raise _beyond_repair(dataset, file) from None
    return index


def _damaged(dataset: Dataset, index: Any) -> list[int]:
    """The numbers of damaged shards; of those in a bucket only the sizes are compared."""
    if is_remote(dataset.uri):
        sizes = dict(list_below(dataset.images))
        return [number for number, entry in enumerate(index) if sizes.get(f"{number:05d}.arrow") != entry["bytes"]]
    files = [local_path(_file(dataset, number)) for number in range(len(index))]
    return [number for number, entry in enumerate(index) if not has_sha256(files[number], entry["sha256"])]


def _write_again(dataset: Dataset, expected: dict[int, str], images: Images, part: Part) -> str:
    file = _file(dataset, part.number)
    try:
        with atomic_output(file) as path:
            if write_shard(path, part.rows, images).sha256 != expected[part.number]:  # other versions of Arrow, Pillow
                raise _beyond_repair(dataset, file)
    except OSError as error:
        raise BadData(f"cannot write {file}, which is damaged: {error.strerror or error}") from None
    return file


def _beyond_repair(dataset: Dataset, file: str) -> BadData:
    return BadData(f"{file}: missing or damaged; remove {dataset.uri} and ingest again")
