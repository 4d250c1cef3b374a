"""From a view to batches of cached feature maps (`feature_maps`), where `loading` makes batches of images.

As with images, every random choice is a function of (seed, epoch, row, draw).
"""

from functools import lru_cache

import numpy as np
import torch

from csc.data.feature_maps import FeatureCard, FeatureShards
from csc.data.loading import Batch, Batches, BatchKey, loaded
from csc.data.order import Plan
from csc.data.views import View

__all__ = ["map_batches"]


def map_batches(view: View, maps_uri: str, plan: Plan, seed: int, *, variants: int) -> Batches:
    """All batches of some epochs, one after the other; with a GPU they are read ahead while it computes.

    Args:
        view: which images, with which labels.
        maps_uri: the folder of the maps.
        plan: of each epoch its number and its batches.
        seed: decides, with the epoch, which variant of a row is shown.
        variants: from how many augmented variants to draw, however many there are; 0 for the plain one.
    """
    reader = _Reader(view, maps_uri, seed, variants)
    keys = ((epoch, batch) for epoch, batches in plan for batch in batches)
    return loaded(reader.batch, keys, ahead=torch.cuda.is_available())


class _Reader:
    def __init__(self, view: View, maps_uri: str, seed: int, variants: int) -> None:
        card = FeatureCard.read(maps_uri)
        self.channels, self.height, self.width = card.shape
        self.variants = min(variants, card.variants)
        self.shards = [FeatureShards(maps_uri, number, card.shape) for number in range(self.variants + 1)]
        self.positions = view.positions()
        self.targets = torch.from_numpy(view.targets().astype(np.float32))
        self.seed = seed
        self.shown = lru_cache(maxsize=1)(self._shown)

    def _shown(self, epoch: int) -> list[int]:
        """The variant that each row shows in an epoch."""
        count = len(self.positions)
        if self.variants == 0:
            return [0] * count
        drawn: list[int] = np.random.default_rng([self.seed, epoch, 1]).integers(1, self.variants + 1, count).tolist()
        return drawn

    def batch(self, key: BatchKey) -> Batch:
        """The maps of some rows as an epoch shows them: float16 in channels-last memory."""
        epoch, batch = key
        shown, rows = self.shown(epoch), batch.rows
        maps = torch.empty((len(rows), self.height, self.width, self.channels), dtype=torch.float16)
        for target, row, number in zip(maps.numpy(), rows, batch.numbers, strict=True):
            # Each draw shows the next variant.
            variant = (shown[row] - 1 + number) % self.variants + 1 if self.variants else 0
            target[...] = self.shards[variant].map(*self.positions[row])
        return Batch(maps.permute(0, 3, 1, 2), self.targets[rows], torch.tensor(rows, dtype=torch.int64))
