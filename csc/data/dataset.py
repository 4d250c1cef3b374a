"""The data-set contract: a label table, and image shards that workers memory-map.

    dataset.json        name, classes (in the order of their arrival), splits with counts, fingerprint, source
    labels.parquet      image_id, split, shard, row, labels, difficult
    images/NNNNN.arrow  image_id, jpeg, width, height
    images/index.json   rows, bytes and SHA-256 of each shard

`ingest/` writes it, this module opens it, `shards` reads the images. Opening needs nothing but JSON, so that a step
which only asks for the classes starts at once.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from csc.errors import BadData, explained
from csc.storage import exists, is_remote, join, json_digest, local_path, read_bytes, read_json

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SPLITS", "Dataset", "card_digest"]

SPLITS = ("train", "test")


def card_digest(info: Mapping[str, Any]) -> str:
    """The SHA-256 of what a card says, its digest aside, however it is laid out."""
    return json_digest({key: value for key, value in info.items() if key != "digest"})


class Dataset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An ingested data set, opened for reading: its address, and what `dataset.json` says."""

    uri: str
    name: str
    classes: tuple[str, ...]
    splits: dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]
    fingerprint: str
    source: dict[str, Any]
    difficult_is_member: bool
    labels_sha256: str = ""  # of labels.parquet
    digest: str = ""  # of all other facts in the card; none in older data sets

    @staticmethod
    def exists(uri: str | os.PathLike[str]) -> bool:
        """Whether there is a finished data set; its card is written last."""
        return exists(join(uri, "dataset.json"))

    @classmethod
    def open(cls, uri: str | os.PathLike[str]) -> "Dataset":
        """Open the data set in a folder or below an `s3://` prefix."""
        uri = os.fspath(uri).rstrip("/") if is_remote(uri) else str(local_path(uri))
        if not cls.exists(uri):
            raise BadData(f"{uri}: not a data set (no dataset.json); make one with 'csc ingest … --out {uri}'")
        card = join(uri, "dataset.json")
        info = read_json(card)
        if not isinstance(info, dict):
            raise BadData(f"{card}: expected an object with name, classes, splits, fingerprint, source")
        try:
            dataset = msgspec.convert({**info, "uri": uri}, cls)
            dataset._check()
        except (KeyError, TypeError, ValueError) as error:
            raise BadData(f"{card}: wrong or missing key ({explained(error)}); ingest the data set again") from None
        if dataset.digest and dataset.digest != card_digest(info):
            raise BadData(f"{card}: its content is not what was written; ingest the data set again")
        return dataset

    def _check(self) -> None:
        """Raise an error for what the types do not tell."""
        for split in SPLITS:
            self.splits[split]["images"]
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise ValueError("classes is empty or has a name twice")

    @property
    def path(self) -> Path:
        """The folder of a local data set."""
        return local_path(self.uri)

    @property
    def shards_uri(self) -> str:
        """The uri of the image shards: all that training may see of the data set."""
        return join(self.uri, "images")

    def labels(self) -> "pa.Table":
        """The label table of all splits."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from csc.data.columns import LABELS, check_positions

        file = join(self.uri, "labels.parquet")
        content = read_bytes(file)
        try:
            if self.labels_sha256 and hashlib.sha256(content).hexdigest() != self.labels_sha256:
                raise ValueError("its bytes are not those that were written")
            table = pq.ParquetFile(pa.BufferReader(content)).read().cast(LABELS)
            check_positions(table)
            return table
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadData(f"{file}: not readable ({error}); remove {self.uri} and ingest again") from None
