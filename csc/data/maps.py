"""From a view to batches of cached feature maps, in the place of images.

As with images, every random choice is a function of (seed, epoch, row).
"""

from collections.abc import Generator, Sequence

import numpy as np
import torch

from csc.data.columns import to_numpy
from csc.data.features import FeatureShards, read_features
from csc.data.loading import Batch, Batches, Plan
from csc.data.partial import View

__all__ = ["map_batches"]


def map_batches(view: View, place: str, plan: Plan, seed: int, *, augmented: bool) -> Batches:
    """All batches of some epochs, one after the other.

    Args:
        view: which images, with which labels.
        place: of the maps.
        plan: of each epoch its number and the rows of its batches.
        seed: decides, with the epoch, which view of a row is shown.
        augmented: whether to draw from the augmented views; otherwise the plain one is shown.
    """
    reader = _Reader(view, place, augmented=augmented)
    return Batches(reader.batches(plan, seed))


class _Reader:
    def __init__(self, view: View, place: str, *, augmented: bool) -> None:
        card = read_features(place)
        self.channels, self.height, self.width = card.shape
        self.views = card.views if augmented else 0
        self.shards = [FeatureShards(place, number, card.shape) for number in range(self.views + 1)]
        self.places = np.stack([to_numpy(view.table["shard"]), to_numpy(view.table["row"])], axis=1).tolist()
        self.targets = torch.from_numpy(view.targets().astype(np.float32))

    def batches(self, plan: Plan, seed: int) -> Generator[Batch]:
        for epoch, batches in plan:
            shown = self._shown(epoch, seed)
            for rows in batches:
                yield self._batch(rows, shown)

    def _shown(self, epoch: int, seed: int) -> list[int]:
        """The view that each row shows in an epoch."""
        count = len(self.places)
        if self.views == 0:
            return [0] * count
        drawn: list[int] = np.random.default_rng([seed, epoch, 1]).integers(1, self.views + 1, count).tolist()
        return drawn

    def _batch(self, rows: Sequence[int], shown: Sequence[int]) -> Batch:
        """The maps of some rows: float16 in channels-last memory."""
        count = len(self.places)
        maps = torch.empty((len(rows), self.height, self.width, self.channels), dtype=torch.float16)
        for target, row in zip(maps.numpy(), rows, strict=True):
            again, image = divmod(row, count)  # of a row that is shown again in the epoch, the next view
            number = (shown[image] - 1 + again) % self.views + 1 if self.views else 0
            target[...] = self.shards[number].map(*self.places[image])
        images = [row % count for row in rows]
        return Batch(maps.permute(0, 3, 1, 2), self.targets[images], torch.tensor(images, dtype=torch.int64))
