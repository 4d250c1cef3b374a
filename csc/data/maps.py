"""From a view to batches of cached feature maps, in the place of images.

As with images, every random choice is a function of (seed, epoch, row, draw).
"""

from functools import lru_cache

import numpy as np
import torch

from csc.data.features import FeatureShards, read_features
from csc.data.loading import Batch, Batches, BatchKey, loaded
from csc.data.order import Plan
from csc.data.views import View

__all__ = ["map_batches"]


def map_batches(view: View, uri: str, plan: Plan, seed: int, *, views: int) -> Batches:
    """All batches of some epochs, one after the other; with a GPU they are read ahead while it computes.

    Args:
        view: which images, with which labels.
        uri: of the maps.
        plan: of each epoch its number and its batches.
        seed: decides, with the epoch, which view of a row is shown.
        views: from how many augmented views to draw, however many there are; none for the plain one.
    """
    reader = _Reader(view, uri, seed, views)
    keys = ((epoch, batch) for epoch, batches in plan for batch in batches)
    return loaded(reader.batch, keys, ahead=torch.cuda.is_available())


class _Reader:
    def __init__(self, view: View, uri: str, seed: int, views: int) -> None:
        card = read_features(uri)
        self.channels, self.height, self.width = card.shape
        self.views = min(views, card.views)
        self.shards = [FeatureShards(uri, number, card.shape) for number in range(self.views + 1)]
        self.positions = view.positions()
        self.targets = torch.from_numpy(view.targets().astype(np.float32))
        self.seed = seed
        self.shown = lru_cache(maxsize=1)(self._shown)

    def _shown(self, epoch: int) -> list[int]:
        """The view that each row shows in an epoch."""
        count = len(self.positions)
        if self.views == 0:
            return [0] * count
        drawn: list[int] = np.random.default_rng([self.seed, epoch, 1]).integers(1, self.views + 1, count).tolist()
        return drawn

    def batch(self, key: BatchKey) -> Batch:
        """The maps of some rows as an epoch shows them: float16 in channels-last memory."""
        epoch, batch = key
        shown, rows = self.shown(epoch), batch.rows
        maps = torch.empty((len(rows), self.height, self.width, self.channels), dtype=torch.float16)
        for target, row, number in zip(maps.numpy(), rows, batch.numbers, strict=True):
            view = (shown[row] - 1 + number) % self.views + 1 if self.views else 0  # each draw shows the next view
            target[...] = self.shards[view].map(*self.positions[row])
        return Batch(maps.permute(0, 3, 1, 2), self.targets[rows], torch.tensor(rows, dtype=torch.int64))
