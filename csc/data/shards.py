"""Image shards for reading: memory-mapped, from a folder or through the cache of this node."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from csc.data.cache import NodeCache
from csc.errors import BadData, Unavailable, explained
from csc.storage import is_remote, join, list_below, local_path, read_json, sha256_file

__all__ = ["ImageShards", "IndexEntry", "ShardFiles", "damaged_shards", "has_sha256", "read_index", "shard_name"]

INGEST_AGAIN = "run the same csc ingest again, it writes damaged shards again"


class IndexEntry(msgspec.Struct, frozen=True):
    """What `index.json` says of one shard next to it."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


def read_index(uri: str, remedy: str) -> list[IndexEntry]:
    """Read the index of the shards in a folder."""
    file = join(uri, "index.json")
    try:
        return msgspec.convert(read_json(file), list[IndexEntry])
    except Unavailable:
        raise
    except BadData as error:
        raise BadData(f"{error}; {remedy}") from None
    except ValueError as error:
        raise BadData(f"{file}: no rows, bytes and sha256 of each shard ({explained(error)}); {remedy}") from None


def shard_name(number: int) -> str:
    """The name of a shard's file, of images or of feature maps."""
    return f"{number:05d}.arrow"


def has_sha256(path: Path, sha256: str) -> bool:
    """Whether there is a readable file with this content."""
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False


def damaged_shards(uri: str, index: Sequence[IndexEntry]) -> list[int]:
    """The numbers of shards that are missing or damaged; of those in a bucket only the sizes are compared."""
    if is_remote(uri):
        sizes = dict(list_below(uri))
        return [number for number, entry in enumerate(index) if sizes.get(shard_name(number)) != entry.bytes]
    folder = local_path(uri)
    return [number for number, entry in enumerate(index) if not has_sha256(folder / shard_name(number), entry.sha256)]


class ShardFiles:
    """One column of the files NNNNN.arrow in a folder; a file is mapped into memory when it is first asked for.

    Its bytes are compared with the SHA-256 in the `index.json` next to it, once per process. Files in a bucket
    are mapped from the cache of this node. `remedy` says what to do about files that are missing or broken.
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
        return join(self.uri, shard_name(shard))

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
            changed = 0 if self._cache else path.stat().st_mtime_ns  # a cached file has the time of its last use there
            if _sha256(path, changed) != self._entry(shard).sha256:
                if self._cache is not None:
                    path.unlink()  # the copy was damaged on this node: fetch it again
                    _sha256.cache_clear()
                    raise FileNotFoundError(f"{path} was damaged")
                raise OSError("its bytes are not those that were written")
            return path, pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(self._column)

    def _local(self, shard: int) -> AbstractContextManager[Path]:
        """The local file, to be opened in the block."""
        if not is_remote(self.uri):
            return nullcontext(Path(self.where(shard)))
        entry = self._entry(shard)
        if self._cache is None:
            self._cache = NodeCache.of_this_node()
            self._warn(self._cache.limit_bytes)
        return self._cache.fetched(self.where(shard), entry.sha256, entry.bytes, self._remedy)

    def _entry(self, shard: int) -> IndexEntry:
        if not self._index:
            self._index = read_index(self.uri, self._remedy)
        if not 0 <= shard < len(self._index):
            raise BadData(f"{join(self.uri, 'index.json')}: has no shard {shard}; {self._remedy}")
        return self._index[shard]

    def _warn(self, limit: int) -> None:
        """Warn if the cache is smaller than all files: shuffled reading would fetch them again and again."""
        needed = sum(entry.bytes for entry in self._index)
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


@cache
def _sha256(path: Path, _changed: int) -> str:
    """The SHA-256 of a file, computed once per process while it does not change."""
    return sha256_file(path)


class ImageShards:
    """Random access to the encoded images of a data set, from any number of threads and processes."""

    def __init__(self, uri: str | Path) -> None:
        self._files = ShardFiles(uri, "jpeg", INGEST_AGAIN)

    def jpeg(self, shard: int, row: int) -> memoryview:
        """The encoded bytes of one image, without a copy."""
        try:
            return memoryview(self._files.column(shard)[row].as_buffer())
        except (IndexError, TypeError, AttributeError):
            raise BadData(f"{self.where(shard, row)}: no image; {INGEST_AGAIN}") from None

    def where(self, shard: int, row: int) -> str:
        """How an error names an image."""
        return f"{self._files.where(shard)} row {row}"
