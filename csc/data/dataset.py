"""The data-set contract: a label table beside image shards that workers memory-map.

    dataset.json        name, classes (sorted), splits with counts, fingerprint, source
    labels.parquet      image_id, split, shard, row, labels, difficult
    images/NNNNN.arrow  image_id, jpeg, width, height
    images/index.json   rows, bytes and SHA-256 of each shard

Readers (`digits`, `voc`, `coco`) list what there is, `writing` makes the folder, this module opens it, `images` reads
the shards. Opening needs nothing but JSON, so that a step which only asks for the classes starts at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.errors import BadData
from csc.storage import exists, is_remote, join, local_path, read_bytes, read_json

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SPLITS", "Dataset"]

SPLITS = ("train", "test")


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

    def labels(self) -> "pa.Table":
        """The label table of all splits."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from csc.data.columns import LABELS

        file = join(self.place, "labels.parquet")
        content = pa.BufferReader(read_bytes(file)) if is_remote(file) else file
        try:
            return pq.ParquetFile(content).read().cast(LABELS)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadData(f"{file}: not readable ({error}); ingest the data set again") from None
