"""Cached feature maps: what a frozen backbone sees in each image, computed once per data set, weights and size.

The embed step makes the folder with what is here, and `map_batches` reads batches from it. What pipelines and steps
call `features` is its uri, here and elsewhere `uri` or `maps_uri`.

    features/<key>/features.json        the card; written last, so its presence means that the maps are complete
    features/<key>/backbone.safetensors the weights the maps were made with; a model trained on them carries these on
    features/<key>/view-00/NNNNN.arrow  float16 maps in the row order of the image shards, and index.json
    features/<key>/view-VV/NNNNN.arrow  the same for augmented variants of the training images, from 01

The folder is in the data set, local or remote. Everything that decides a map is in the key, so files never go stale.
"""

import math
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from csc.config.checks import weights_file
from csc.config.schema import Config
from csc.data.cache import NodeCache
from csc.data.dataset import Dataset
from csc.data.shards import ShardFiles, has_sha256
from csc.errors import BadData, explained
from csc.storage import exists, is_remote, join, json_digest, local_path, read_json, sha256_file, version_of
from csc.version import sources_digest

__all__ = [
    "BATCH_ROWS",
    "CARD",
    "REMEDY",
    "WEIGHTS",
    "FeatureCard",
    "FeatureShards",
    "Maps",
    "WeightsFile",
    "backbone_weights",
    "features_key",
    "features_uri",
    "has_weights",
    "map_channels",
    "refuse_leaky",
    "variant_uri",
    "write_maps",
]

CARD, WEIGHTS = "features.json", "backbone.safetensors"
REMEDY = "remove the folder and embed again"
BATCH_ROWS = 64  # rows of a record batch; a row is found by division
# The sources that decide a map.
MADE_BY = (
    "data/augment.py",
    "data/decode.py",
    "data/loading.py",
    "nets/backbone.py",
    "nets/folding.py",
    "nets/network.py",
)
Count = Annotated[int, msgspec.Meta(ge=0)]
Maps = np.ndarray[tuple[int, ...], np.dtype[np.float16]]


class WeightsFile(msgspec.Struct, frozen=True):
    """Size and SHA-256 of `backbone.safetensors`."""

    bytes: int
    sha256: str


class FeatureCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"variants": "views"}):
    """What cached maps are maps of.

    Attributes:
        key: name of the folder.
        shape: of one map (channels, height, width); on disk the channels come last, as the heads read them.
        variants: how many augmented variants of each training image there are, besides the plain one.
        backbone: the weights they were made with.
        initialisation: where the weights came from, as in a model card.
    """

    key: str
    shape: tuple[Count, Count, Count]
    variants: Count
    backbone: WeightsFile
    initialisation: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, uri: str) -> "FeatureCard":
        """Read the card of finished maps."""
        card = join(uri, CARD)
        if not exists(card):
            raise BadData(f"{card}: no such file; the embed step makes it (features.views=1)")
        try:
            return msgspec.convert(read_json(card), cls)
        except ValueError as error:
            raise BadData(f"{card}: not a card of feature maps ({explained(error)}); {REMEDY}") from None


def features_key(config: Config, fingerprint: str) -> str:
    """Name the maps by all that decides them: images, weights, size, decoding, and the code of these."""
    backbone = config.backbone
    key_parts = [fingerprint, backbone.name, backbone.output_stride, _weights(config), config.input.size]
    code = [sources_digest(*MADE_BY), metadata.version("timm")]
    return json_digest([*key_parts, config.input.decode, *code])[:16]


def _weights(config: Config) -> str:
    if config.init == "scratch":
        return f"scratch, seed {config.seed}"
    if config.init == "hub":
        from csc.nets.backbone import from_hub  # imported here because it imports torch

        return sha256_file(from_hub(config.backbone.name))  # the hub may give a name other weights
    return sha256_file(weights_file(config.init))


def features_uri(dataset: Dataset, key: str) -> str:
    """The uri of the maps of a data set."""
    return join(dataset.uri, "features", key)


def map_channels(uri: str) -> int:
    """The channels of cached maps; 0 without any (an empty uri)."""
    return FeatureCard.read(uri).shape[0] if uri else 0


def refuse_leaky(card: FeatureCard, config: Config) -> None:
    """Refuse maps of weights that have seen COCO labels, just as the weights themselves are refused."""
    if card.initialisation.get("leaky") and not config.allow_leaky_init:
        from csc.nets.backbone import leak

        raise leak(config.init)


def has_weights(uri: str, card: FeatureCard) -> bool:
    """Whether the backbone of the maps is there as the card says; in a bucket only the size is compared."""
    file = join(uri, WEIGHTS)
    if not is_remote(file):
        return has_sha256(local_path(file), card.backbone.sha256)
    return exists(file) and version_of(file)[0] == card.backbone.bytes


def backbone_weights(uri: str) -> Path:
    """The file of the weights that the maps were made with, on this machine."""
    file, card = join(uri, WEIGHTS), FeatureCard.read(uri)
    if is_remote(file):
        cache, sha256 = NodeCache.of_this_node(), card.backbone.sha256
        copy = cache.fetch(file, sha256, card.backbone.bytes, REMEDY)
        if not has_sha256(copy, sha256):  # damaged since it was fetched
            copy.unlink(missing_ok=True)
            copy = cache.fetch(file, sha256, card.backbone.bytes, REMEDY)
        return copy
    if not has_weights(uri, card):
        raise BadData(f"{file}: missing or damaged; {REMEDY}")
    return local_path(file)


def variant_uri(uri: str, variant: int) -> str:
    """The folder of one variant: 0 is the plain one."""
    return join(uri, f"view-{variant:02d}")


def write_maps(batches: Iterable[Maps], shape: tuple[int, int, int], path: Path) -> int:
    """Write the maps of one shard (rows, height, width, channels), in batches of `BATCH_ROWS` but for the last.

    Returns how many rows it has.
    """
    channels, height, width = shape
    column = pa.binary(2 * channels * height * width)
    rows = 0
    with pa.ipc.new_file(str(path), pa.schema([("map", column)])) as writer:
        for maps in batches:
            values = pa.FixedSizeBinaryArray.from_buffers(column, len(maps), [None, pa.py_buffer(maps)])
            writer.write_batch(pa.record_batch([values], names=["map"]))
            rows += len(maps)
    return rows


class FeatureShards:
    """Random access to the maps of one variant, without a copy; a shard is opened when it is first asked for."""

    def __init__(self, uri: str, variant: int, shape: tuple[int, int, int]) -> None:
        channels, height, width = shape
        self.shape = (height, width, channels)
        self._files = ShardFiles(variant_uri(uri, variant), "map", REMEDY)
        self._arrays: dict[int, list[Maps]] = {}

    def map(self, shard: int, row: int) -> Maps:
        """One map (height, width, channels), without a copy."""
        arrays = self._arrays.get(shard) or self._map(shard)
        try:
            one: Maps = arrays[row // BATCH_ROWS][row % BATCH_ROWS]
        except IndexError:
            raise BadData(f"{self._files.where(shard)}: has no row {row}; {REMEDY}") from None
        return one

    def _map(self, shard: int) -> list[Maps]:
        """The record batches of a shard; forget those of files that the cache has removed."""
        column = self._files.column(shard)
        if column.type != pa.binary(2 * math.prod(self.shape)):
            expected = " × ".join(map(str, self.shape))
            raise BadData(f"{self._files.where(shard)}: has no float16 maps of {expected}; {REMEDY}")
        buffers = [chunk.buffers()[1] for chunk in column.chunks]
        arrays: list[Maps] = [np.frombuffer(buffer, np.float16).reshape(-1, *self.shape) for buffer in buffers]
        kept = {other: maps for other, maps in self._arrays.items() if self._files.is_mapped(other)}
        self._arrays = {**kept, shard: arrays}
        return arrays
