"""Whether the shards of a finished data set are as they were written; those that are not are made anew."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from csc.data.dataset import Dataset
from csc.data.ingest.shards import Images, Part, is_whole, write_shard
from csc.data.ingest.workers import for_each_part
from csc.errors import BadData, Unavailable
from csc.storage import atomic_place, is_remote, join, list_below, local_path, read_json

__all__ = ["is_undamaged", "mend"]


def mend(dataset: Dataset, parts: Sequence[Part], images: Images, workers: int) -> Iterator[str]:
    """Make shards anew that are missing or not as the index of the data set says; name each.

    Args:
        dataset: whose images are known to be those of the source.
        parts: what its shards are made from.
        images: where the images come from.
        workers: processes that make shards.
    """
    index = _index(dataset)
    damaged = _damaged(dataset, index)
    if damaged and [entry["rows"] for entry in index] != [len(part.rows) for part in parts]:
        raise _beyond_repair(dataset, _file(dataset, damaged[0]))  # it was sharded in another way
    work = functools.partial(_make_again, dataset, {number: index[number]["sha256"] for number in damaged})
    yield from for_each_part(work, images, [parts[number] for number in damaged], workers)


def is_undamaged(dataset: Dataset) -> bool:
    """Whether there is nothing to mend."""
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
    """The numbers of shards that are not whole; of those in a bucket only the sizes are looked at."""
    if is_remote(dataset.place):
        sizes = dict(list_below(dataset.images))
        return [number for number, entry in enumerate(index) if sizes.get(f"{number:05d}.arrow") != entry["bytes"]]
    files = [local_path(_file(dataset, number)) for number in range(len(index))]
    return [number for number, entry in enumerate(index) if not is_whole(files[number], entry["sha256"])]


def _make_again(dataset: Dataset, wanted: dict[int, str], images: Images, part: Part) -> str:
    file = _file(dataset, part.number)
    try:
        with atomic_place(file) as path:
            if write_shard(path, part.rows, images).sha256 != wanted[part.number]:  # other versions of Arrow or Pillow
                raise _beyond_repair(dataset, file)
    except OSError as error:
        raise BadData(f"cannot write {file}, which is damaged: {error.strerror or error}") from None
    return file


def _beyond_repair(dataset: Dataset, file: str) -> BadData:
    return BadData(f"{file}: missing or damaged; remove {dataset.place} and ingest again")
