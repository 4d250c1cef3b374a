"""Image shards for reading: memory-mapped, from a folder or through the cache of this node."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from csc.data.cache import NodeCache
from csc.errors import BadData
from csc.storage import is_remote, join, read_json

__all__ = ["FORMATS", "ImageShards", "IndexEntry", "ShardFiles", "read_index"]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")  # that are decoded; others may start programs


class IndexEntry(msgspec.Struct, frozen=True):
    """What `index.json` says of one shard next to it."""

    rows: int
    bytes: int
    sha256: str


def read_index(uri: str, remedy: str) -> list[IndexEntry]:
    """Read the index of the shards in a folder."""
    file = join(uri, "index.json")
    try:
        return msgspec.convert(read_json(file), list[IndexEntry])
    except msgspec.ValidationError as error:
        raise BadData(f"{file}: no rows, bytes and sha256 of each shard ({error}); {remedy}") from None


class ShardFiles:
    """One column of the files NNNNN.arrow in a folder; a file is mapped into memory when it is first asked for.

    Files in a bucket are mapped from the cache of this node, which verifies them by the `index.json` next to them.
    `remedy` says what to do about files that are missing or broken.
    """

    def __init__(self, uri: str | Path, column: str, remedy: str) -> None:
        self.uri = str(uri)
        self._column, self._remedy = column, remedy
        self._maps: dict[int, tuple[Path, pa.ChunkedArray]] = {}
        self._cache: NodeCache | None = None
        self._index: list[IndexEntry] = []

    def column(self, shard: int) -> pa.ChunkedArray:
        """The column in one file, without a copy."""
        mapped = self._maps.get(shard)
        if mapped is None:
            self._forget_removed()
            mapped = self._maps[shard] = self._map(shard)
        return mapped[1]

    def is_mapped(self, shard: int) -> bool:
        """Whether a file is mapped into memory at the moment."""
        return shard in self._maps

    def where(self, shard: int) -> str:
        """The address of one file."""
        return join(self.uri, f"{shard:05d}.arrow")

    def _map(self, shard: int) -> tuple[Path, pa.ChunkedArray]:
        try:
            try:
                return self._read(shard)
            except FileNotFoundError:  # the cache removed it before it was mapped
                return self._read(shard)
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise BadData(f"{self.where(shard)}: not readable ({error}); {self._remedy}") from None

    def _read(self, shard: int) -> tuple[Path, pa.ChunkedArray]:
        with self._local(shard) as path:
            return path, pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(self._column)

    def _local(self, shard: int) -> AbstractContextManager[Path]:
        """The local file, to be opened in the block."""
        if not is_remote(self.uri):
            return nullcontext(Path(self.where(shard)))
        if self._cache is None:
            self._index = read_index(self.uri, self._remedy)
            self._cache = NodeCache.of_this_node()
        if not 0 <= shard < len(self._index):
            raise BadData(f"{join(self.uri, 'index.json')}: has no shard {shard}; {self._remedy}")
        if not self._maps:
            self._warn()
        return self._cache.fetched(self.where(shard), self._index[shard].sha256, self._index[shard].bytes, self._remedy)

    def _warn(self) -> None:
        """Warn if the cache is smaller than all files: shuffled reading would fetch them again and again."""
        assert self._cache is not None
        needed, limit = sum(entry.bytes for entry in self._index), self._cache.limit_bytes
        if needed > limit:
            print(
                f"data: {self.uri} has {needed / 1e9:.1f} GB, the cache of this node takes {limit / 1e9:.1f}: files "
                "will be fetched again and again; raise CSC_CACHE_LIMIT_GB or put CSC_CACHE on a larger disk",
                flush=True,
            )

    def _forget_removed(self) -> None:
        """Close files that the cache has removed: only then is their room on the disk free."""
        for shard, (path, _) in list(self._maps.items()):
            if self._cache is not None and not path.exists():
                self._maps.pop(shard, None)

    def __getstate__(self) -> dict[str, Any]:  # a worker process maps the files itself
        return {**self.__dict__, "_maps": {}, "_cache": None, "_index": []}


class ImageShards:
    """Random access to the encoded images of a data set, from any number of threads and processes."""

    def __init__(self, images: str | Path) -> None:
        self._files = ShardFiles(images, "jpeg", "ingest the data set again")

    def jpeg(self, shard: int, row: int) -> memoryview:
        """The encoded bytes of one image, without a copy."""
        return memoryview(self._files.column(shard)[row].as_buffer())

    def where(self, shard: int, row: int) -> str:
        """How an error names an image."""
        return f"{self._files.where(shard)} row {row}"
