"""Damaged shards of a finished data set: find them and write them again."""

import functools
from collections.abc import Iterator, Sequence

from csc.data.dataset import Dataset
from csc.data.ingest.images import ReadImages
from csc.data.ingest.shard_writer import Part, write_shard
from csc.data.ingest.workers import for_each_part
from csc.data.shards import IndexEntry, damaged_shards, read_index, shard_name
from csc.errors import BadData, Unavailable
from csc.storage import atomic_output, join

__all__ = ["beyond_repair", "is_undamaged", "repair"]


def repair(dataset: Dataset, parts: Sequence[Part], read_images: ReadImages, workers: int) -> Iterator[str]:
    """Write shards again that are missing or differ from the index of the data set; yield the name of each."""
    index = _index(dataset)
    damaged = damaged_shards(dataset.shards_uri, index)
    if damaged and [entry.rows for entry in index] != [len(part.rows) for part in parts]:
        # It has another number of rows per shard.
        raise beyond_repair(dataset, join(dataset.shards_uri, shard_name(damaged[0])))
    work = functools.partial(_write_again, dataset, {number: index[number].sha256 for number in damaged})
    yield from for_each_part(work, read_images, [parts[number] for number in damaged], workers)


def is_undamaged(dataset: Dataset) -> bool:
    """Whether there is nothing to repair."""
    return not damaged_shards(dataset.shards_uri, _index(dataset))


def beyond_repair(dataset: Dataset, file: str) -> BadData:
    """The error for a file that cannot be written again."""
    return BadData(f"{file}: missing or damaged; remove {dataset.uri} and ingest again")


def _index(dataset: Dataset) -> list[IndexEntry]:
    try:
        return read_index(dataset.shards_uri, "")
    except Unavailable:
        raise
    except BadData:
        raise beyond_repair(dataset, join(dataset.shards_uri, "index.json")) from None


def _write_again(dataset: Dataset, expected: dict[int, str], read_images: ReadImages, part: Part) -> str:
    file = join(dataset.shards_uri, shard_name(part.number))
    with atomic_output(file) as path:
        if write_shard(path, part.rows, read_images).sha256 != expected[part.number]:  # other versions of Arrow, Pillow
            raise beyond_repair(dataset, file)
    return file
