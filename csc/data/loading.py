"""From a view to batches: decode, squash-resize, augment, stack.

Every random choice is a function of (seed, epoch, row), never of a process or of time: any number of workers gives
the same batches, and a resumed epoch the same as the first try.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from csc.data.augment import augment
from csc.data.columns import to_numpy
from csc.data.dataset import ImageShards
from csc.data.partial import View
from csc.errors import BadData

__all__ = ["Batch", "decode", "evaluation_batches", "order", "training_batches", "workers_for"]


@dataclass
class Batch:
    """Images as they were stored, resized: uint8 (B, 3, H, W) in channels-last memory, with their labels."""

    images: Tensor
    targets: Tensor  # (B, classes) float
    rows: Tensor  # (B,) row in the view

    def pin_memory(self) -> "Batch":
        """Called by the data loader before a copy to a GPU."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.rows)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(self.images.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), self.rows)


def decode(jpeg: bytes | memoryview, size: int) -> Image.Image:
    """Decode an image and squash it to a square."""
    return Image.open(io.BytesIO(jpeg)).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)


class _Images:
    """A map from (epoch, row) to one decoded image; what the workers of a data loader run."""

    def __init__(self, view: View, size: int, seed: int | None) -> None:
        self.shards = ImageShards(view.images)
        self.places = np.stack([to_numpy(view.table["shard"]), to_numpy(view.table["row"])], axis=1)
        self.targets = view.targets()
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, key: tuple[int, int]) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], int]:
        epoch, row = key
        shard, place = self.places[row]
        try:
            image = decode(self.shards.jpeg(int(shard), int(place)), self.size)
        except (OSError, SyntaxError) as error:
            where = f"{self.shards.folder / f'{shard:05d}.arrow'} row {place}"
            raise BadData(f"{where}: broken image ({error}); ingest the data set again") from None
        if self.seed is not None:
            image = augment(image, np.random.default_rng([self.seed, epoch, row]))
        return np.asarray(image), row

    def collate(self, items: list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], int]]) -> Batch:
        images = torch.from_numpy(np.stack([image for image, _ in items])).permute(0, 3, 1, 2)
        rows = [row for _, row in items]
        return Batch(images, torch.from_numpy(self.targets[rows].astype(np.float32)), torch.tensor(rows))


def workers_for(wanted: int, device: torch.device) -> int:
    """How many loader processes to start; `-1` lets the device decide.

    On a CPU the network needs the cores itself, so loading stays in the training process.
    """
    if wanted >= 0:
        return wanted
    return 0 if device.type == "cpu" else min(8, torch.get_num_threads())


def order(count: int, batch_size: int, seed: int, epoch: int, *, shuffle: bool = True) -> list[list[int]]:
    """The rows of each batch of an epoch; a last batch of one image is left out, batch-norm cannot use it."""
    rows = np.random.default_rng([seed, epoch]).permutation(count) if shuffle else np.arange(count)
    batches = [rows[start : start + batch_size].tolist() for start in range(0, count, batch_size)]
    return batches[:-1] if len(batches) > 1 and len(batches[-1]) == 1 else batches


def training_batches(
    view: View, *, size: int, batch_size: int, seed: int, epochs: range, augment: bool, shuffle: bool, workers: int
) -> Iterator[Batch]:
    """All batches of the given epochs, one after the other; workers live through all of them."""
    dataset = _Images(view, size, seed if augment else None)
    batches = [
        [(epoch, row) for row in rows]
        for epoch in epochs
        for rows in order(len(view), batch_size, seed, epoch, shuffle=shuffle)
    ]
    return iter(_loader(dataset, batches, workers))


def evaluation_batches(view: View, *, size: int, batch_size: int, workers: int) -> Iterator[Batch]:
    """All images of the view in its order, without augmentation."""
    dataset = _Images(view, size, None)
    rows = range(len(view))
    batches = [[(0, row) for row in rows[start : start + batch_size]] for start in range(0, len(view), batch_size)]
    return iter(_loader(dataset, batches, workers))


def _loader(dataset: _Images, batches: list[list[tuple[int, int]]], workers: int) -> "DataLoader[Batch]":
    return DataLoader(
        dataset,  # type: ignore[arg-type]  # keys are (epoch, row)
        batch_sampler=batches,
        collate_fn=dataset.collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # its own: making a loader must not move the network's random state
    )
