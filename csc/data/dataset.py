"""The data-set contract: a label table beside image shards that workers memory-map.

    dataset.json        name, classes (sorted), splits with counts, fingerprint, source
    labels.parquet      image_id, split, shard, row, labels, difficult
    images/NNNNN.arrow  image_id, jpeg, width, height
    images/index.json   rows, bytes and SHA-256 of each shard

Readers (`digits`, `voc`, `coco`) list what there is, `writing` makes the folder; this module reads it.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from csc.data.cache import NodeCache
from csc.errors import BadData
from csc.storage import exists, is_remote, join, local_path, read_bytes, read_json

__all__ = ["LABELS", "SPLITS", "Dataset", "ImageShards", "ShardFiles", "checked_jpeg"]

SPLITS = ("train", "test")

LABELS = pa.schema(
    [
        ("image_id", pa.string()),
        ("split", pa.string()),
        ("shard", pa.int32()),
        ("row", pa.int32()),
        ("labels", pa.list_(pa.string())),
        ("difficult", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Dataset:
    """An ingested data set, opened for reading."""

    place: str
    name: str
    classes: tuple[str, ...]
    splits: dict[str, dict[str, int]]
    fingerprint: str
    source: dict[str, Any]
    difficult_is_member: bool

    @classmethod
    def open(cls, uri: str | Path) -> "Dataset":
        """Open the data set in a folder or below an `s3://` prefix; say what is missing when it is not one."""
        place = os.fspath(uri).rstrip("/") if is_remote(uri) else str(local_path(uri))
        card = join(place, "dataset.json")
        if not exists(card):
            raise BadData(f"{place}: not a data set (no dataset.json); make one with 'csc ingest … --out {place}'")
        info = read_json(card)
        if not isinstance(info, dict):
            raise BadData(f"{card}: expected an object with name, classes, splits, fingerprint, source")
        try:
            dataset = cls(place=place, **(info | {"classes": tuple(info["classes"])}))
            dataset._check_types(info["classes"])
            return dataset
        except (KeyError, TypeError) as error:
            raise BadData(f"{card}: wrong or missing key ({error}); ingest the data set again") from None

    def _check_types(self, classes: Any) -> None:
        """Raise for a file that has the right keys with the wrong things in them."""
        if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise TypeError("classes is not a list of names")
        if not (isinstance(self.name, str) and isinstance(self.fingerprint, str) and isinstance(self.source, dict)):
            raise TypeError("name, fingerprint or source")
        for split in SPLITS:
            int(self.splits[split]["images"])

    @property
    def path(self) -> Path:
        """The folder of a data set that is on this machine; one elsewhere is refused."""
        return local_path(self.place)

    @property
    def images(self) -> str:
        """The place of the image shards: all that training may see of the data set."""
        return join(self.place, "images")

    def labels(self) -> pa.Table:
        """The label table of all splits."""
        file = join(self.place, "labels.parquet")
        content = pa.BufferReader(read_bytes(file)) if is_remote(file) else file
        try:
            return pq.ParquetFile(content).read().cast(LABELS)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadData(f"{file}: not readable ({error}); ingest the data set again") from None


class ShardFiles:
    """One column of the files NNNNN.arrow at a place; a file is mapped into memory when it is first asked for.

    Files in a bucket are mapped from the cache of the node, which fetches them as `index.json` beside them says.
    """

    def __init__(self, place: str | Path, column: str) -> None:
        self.place = str(place)
        self._column = column
        self._maps: dict[int, tuple[Path, pa.ChunkedArray]] = {}
        self._cache: NodeCache | None = None
        self._index: Any = None

    def column(self, shard: int) -> pa.ChunkedArray:
        """The column in one file, without a copy."""
        mapped = self._maps.get(shard)
        if mapped is None:
            self._let_go()
            mapped = self._maps[shard] = self._map(shard)
        return mapped[1]

    def where(self, shard: int) -> str:
        """The address of one file."""
        return join(self.place, f"{shard:05d}.arrow")

    def _map(self, shard: int) -> tuple[Path, pa.ChunkedArray]:
        try:
            try:
                return self._read(self._local(shard))
            except FileNotFoundError:  # the cache needed its room before it was mapped
                return self._read(self._local(shard))
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise BadData(f"{self.where(shard)}: not readable ({error}); ingest the data set again") from None

    def _read(self, path: Path) -> tuple[Path, pa.ChunkedArray]:
        return path, pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(self._column)

    def _local(self, shard: int) -> Path:
        """The file on this machine."""
        if not is_remote(self.place):
            return Path(self.where(shard))
        index = join(self.place, "index.json")
        if self._cache is None:
            self._cache, self._index = NodeCache.of_this_node(), read_json(index)
        try:
            entry = self._index[shard]
            sha256, size = str(entry["sha256"]), int(entry["bytes"])
        except (IndexError, KeyError, TypeError, ValueError):
            raise BadData(f"{index}: no bytes and sha256 of shard {shard}; ingest the data set again") from None
        return self._cache.fetch(self.where(shard), sha256, size)

    def _let_go(self) -> None:
        """Forget files that the cache has dropped: their room on the disk is free once nobody maps them."""
        for shard, (path, _) in list(self._maps.items()):
            if self._cache is not None and not path.exists():
                self._maps.pop(shard, None)

    def __getstate__(self) -> dict[str, Any]:  # a worker process maps the files itself
        return {**self.__dict__, "_maps": {}, "_cache": None, "_index": None}


class ImageShards:
    """Random access to the encoded images of a data set, from any number of threads and processes."""

    def __init__(self, images: str | Path) -> None:
        self._files = ShardFiles(images, "jpeg")

    def jpeg(self, shard: int, row: int) -> memoryview:
        """The encoded bytes of one image, without a copy."""
        return memoryview(self._files.column(shard)[row].as_buffer())

    def where(self, shard: int, row: int) -> str:
        """How an error names an image."""
        return f"{self._files.where(shard)} row {row}"


def checked_jpeg(content: bytes, where: str) -> tuple[bytes, int, int]:
    """Return (jpeg, width, height) after decoding the image once; other formats are encoded as JPEG.

    Args:
        content: bytes of an image file.
        where: how an error names the image.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            if image.format == "JPEG":
                image.draft("RGB", (1, 1))  # reads every byte, skips most of the arithmetic
                image.load()
                return content, width, height
            encoded = io.BytesIO()
            image.convert("RGB").save(encoded, "JPEG", quality=95)
            return encoded.getvalue(), width, height
    except UnidentifiedImageError:
        raise BadData(f"{where}: broken image (no known format); replace the file or leave it out of the set") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadData(f"{where}: broken image ({error}); replace the file or leave it out of the set") from None
