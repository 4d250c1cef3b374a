"""embed: the feature maps of a frozen backbone, once for all methods, tasks and seeds.

`csc.data.feature_maps` says what the folder holds, `csc.data.map_batches` reads it.
"""

import contextlib
from collections.abc import Iterator
from itertools import accumulate, islice
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from csc.artifacts import Origin
from csc.config import resolve
from csc.config.schema import Config
from csc.data.dataset import SPLITS, Dataset
from csc.data.feature_maps import (
    BATCH_ROWS,
    CARD,
    REMEDY,
    WEIGHTS,
    FeatureCard,
    Maps,
    WeightsFile,
    features_key,
    features_uri,
    has_weights,
    refuse_leaky,
    variant_uri,
    write_maps,
)
from csc.data.progress import Bar
from csc.data.shards import IndexEntry, damaged_shards, read_index, shard_name
from csc.data.views import View
from csc.errors import BadConfig
from csc.retry import with_retries
from csc.scenario import Scenario
from csc.storage import (
    atomic_output,
    exists,
    explain_write_errors,
    is_remote,
    join,
    local_path,
    sha256_file,
    write_json,
)
from csc.storage.tensors import save_tensors

if TYPE_CHECKING:
    from csc.data.loading import Batch

__all__ = ["embed"]

INDEX = "index.json"  # of a variant: the shards that are finished


@with_retries
def embed(origin: str, scenario: str, config_json: str) -> str:
    """Make sure that the maps which the settings ask for are there, and return their uri.

    Only what is missing or damaged is computed: other shards of an earlier try are kept, and so are variants. Runs that
    make the same maps at once do not spoil them: the first to finish a shard is the one whose shard counts.
    `features.views` says how many variants of a training image there are.
    """
    config = resolve(Scenario.parse(scenario).dataset, config_json)
    if config.features.views == 0:
        raise BadConfig("features.views=0: nothing to embed; set features.views=1")
    dataset = Dataset.open(Origin.from_json(origin).data)
    uri = features_uri(dataset, features_key(config, dataset.fingerprint))
    variants = config.features.views if config.input.augment else 0
    if _are_there(uri, variants, dataset):
        refuse_leaky(FeatureCard.read(uri), config)
        print(f"data: feature maps are there · {uri}")
    else:
        _Embedding(config, dataset, uri).run(variants)
    return uri


def _are_there(uri: str, variants: int, dataset: Dataset) -> bool:
    """Whether maps are complete: a card promises so many variants, each has all images, and no file is damaged."""
    if not exists(join(uri, CARD)):
        return False
    card = FeatureCard.read(uri)
    if card.variants < variants or not has_weights(uri, card):
        return False
    training, test = (dataset.splits[split]["images"] for split in SPLITS)
    image_counts = [training + test, *[training] * variants]
    return all(
        sum(shard.rows for shard in _finished(uri, variant)) >= rows and not _damaged(uri, variant)
        for variant, rows in enumerate(image_counts)
    )


def _finished(uri: str, variant: int) -> list[IndexEntry]:
    """What the index of a variant says of its finished shards, which are the first ones."""
    folder = variant_uri(uri, variant)
    return read_index(folder, REMEDY) if exists(join(folder, INDEX)) else []


def _damaged(uri: str, variant: int) -> list[int]:
    """The numbers of finished shards that are to be made again."""
    return damaged_shards(variant_uri(uri, variant), _finished(uri, variant))


class _IndexChanged(Exception):
    """Another run has finished the shard that this one was making, or has overwritten the index with an older one."""


class _Embedding:
    """A frozen backbone at work on a whole data set."""

    def __init__(self, config: Config, dataset: Dataset, uri: str) -> None:
        from csc.distributed.group import single_process
        from csc.nets.backbone import initialise, normalisation
        from csc.nets.head import Head
        from csc.nets.network import Network
        from csc.training.device import for_inference
        from csc.training.start import seed_everything

        self.config, self.dataset, self.uri = config, dataset, uri
        seed_everything(config.seed, 1)  # random weights are those that the base task would start from
        backbone, self.initialisation = initialise(config.backbone, config.init, allow_leaky=config.allow_leaky_init)
        self.mean, self.std = normalisation(backbone)
        self.device = single_process().device
        self.weights = backbone.state_dict()  # a model that learns from maps is saved with these
        network = Network(backbone, Head(), self.mean, self.std)
        self.network = for_inference(network, config, self.device)
        table = dataset.labels().select(["image_id", "split", "shard", "row"])
        self.shards = [table.filter(pc.equal(table["shard"], number)) for number in range(_shards(table))]
        self.of_training = _shards(table.filter(pc.equal(table["split"], "train")))  # they are the first ones

    def run(self, variants: int) -> None:
        """Compute the plain variant of all images and so many augmented ones of the training images; write the card."""
        counts = [self.shards, *[self.shards[: self.of_training]] * variants]
        left = [variant for variant, shards in enumerate(counts) if len(_finished(self.uri, variant)) < len(shards)]
        print(f"data: feature maps of {self.config.backbone.name} · {variants + 1} views, {len(left)} to make")
        shape = self._shape()
        for variant in left:
            while len(_finished(self.uri, variant)) < len(counts[variant]):
                with contextlib.suppress(_IndexChanged):  # continue with the first shard that it lacks
                    self._make(variant, counts[variant], shape)
        for variant, shards in enumerate(counts):
            for number in _damaged(self.uri, variant):
                print(f"data: {self._file(variant, number)} is damaged and made again")
                with Bar(f"data: embed view {variant}", len(shards[number]), "images") as bar:
                    self._write(variant, number, next(self._maps([shards[number]], variant, bar)), shape)
        if not _are_there(self.uri, variants, self.dataset):  # else another run has written the card
            self._write_card(variants, shape)
        if not is_remote(self.uri):  # now that all shards are there, what killed processes were writing is of no use
            for path in local_path(self.uri).glob("view-*/.*.arrow.*"):
                path.unlink(missing_ok=True)

    def _write_card(self, variants: int, shape: tuple[int, int, int]) -> None:
        """Say that the maps are complete, and what they are maps of; the backbone is kept with them."""
        with atomic_output(join(self.uri, WEIGHTS)) as temporary:
            save_tensors(self.weights, temporary)
            weights = WeightsFile(temporary.stat().st_size, sha256_file(temporary))
        card = FeatureCard(
            key=self.uri.rpartition("/")[2],
            shape=shape,
            variants=variants,
            backbone=weights,
            initialisation=self.initialisation.to_plain(),
            mean=self.mean,
            std=self.std,
        )
        write_json(join(self.uri, CARD), msgspec.to_builtins(card))

    def _make(self, variant: int, shards: list[pa.Table], shape: tuple[int, int, int]) -> None:
        """Compute one variant, shard by shard, from the first that is not finished."""
        first = len(_finished(self.uri, variant))
        done = sum(map(len, shards[:first]))
        with Bar(f"data: embed view {variant}", sum(map(len, shards)), "images", done=done) as bar:
            for number, maps in enumerate(self._maps(shards[first:], variant, bar), first):
                self._write(variant, number, maps, shape, is_new=True)

    def _write(
        self, variant: int, number: int, maps: Iterator[Maps], shape: tuple[int, int, int], *, is_new: bool = False
    ) -> None:
        """Write a shard, then put it into the index of its variant; what another run has added after it stays."""
        with atomic_output(self._file(variant, number)) as temporary, explain_write_errors(temporary):
            rows = write_maps(maps, shape, temporary)
            if is_new and len(_finished(self.uri, variant)) > number:
                raise _IndexChanged
            entry = IndexEntry(rows, temporary.stat().st_size, sha256_file(temporary))
        self._note(variant, number, entry)

    def _note(self, variant: int, number: int, entry: IndexEntry) -> None:
        index = _finished(self.uri, variant)
        if len(index) < number:
            raise _IndexChanged
        index[number : number + 1] = [entry]
        write_json(join(variant_uri(self.uri, variant), INDEX), msgspec.to_builtins(index))

    def _file(self, variant: int, number: int) -> str:
        return join(variant_uri(self.uri, variant), shard_name(number))

    def _maps(self, shards: list[pa.Table], variant: int, bar: Bar) -> Iterator[Iterator[Maps]]:
        """The maps of each shard, batch by batch; one loader runs through all of them and never waits between two."""
        from csc.data.loading import image_batches, workers_for
        from csc.data.order import BatchRows

        config = self.config
        parts = [
            [range(row, min(row + BATCH_ROWS, end)) for row in range(end - len(shard), end, BATCH_ROWS)]
            for shard, end in zip(shards, accumulate(map(len, shards)), strict=True)
        ]
        batches = image_batches(
            unlabelled(self.dataset, pa.concat_tables(shards)),
            [(variant, [BatchRows(rows) for shard in parts for rows in shard])],
            seed=None,  # variant, shard and row of an image decide what it looks like, not where an earlier try ended
            size=config.input.size,
            mode=config.input.decode,
            augment=variant > 0,
            workers=workers_for(config.train.workers, self.device),
        )
        for shard in parts:
            yield (self._feature_maps(batch, bar) for batch in islice(batches, len(shard)))

    def _feature_maps(self, batch: "Batch", bar: Bar) -> Maps:
        """What the backbone sees in a batch: (rows, height, width, channels)."""
        import torch

        with torch.inference_mode():
            maps = self.network.features(batch.to(self.device).images).permute(0, 2, 3, 1)
        bar.advance(len(batch.rows))
        seen: Maps = maps.to("cpu", torch.float16).contiguous().numpy()
        return seen

    def _shape(self) -> tuple[int, int, int]:
        import torch

        side = self.config.input.size
        with torch.inference_mode():
            image = torch.zeros(1, 3, side, side, dtype=torch.uint8, device=self.device)
            _, channels, height, width = self.network.features(image).shape
        return channels, height, width


def unlabelled(dataset: Dataset, rows: pa.Table) -> View:
    """Some rows of a data set as a view that shows no labels."""
    labels = pa.nulls(len(rows), pa.list_(pa.int16())).fill_null([])
    return View(rows.append_column("labels", labels), (), dataset.shards_uri, dataset.fingerprint)


def _shards(table: pa.Table) -> int:
    return int(pc.max(table["shard"]).as_py()) + 1
