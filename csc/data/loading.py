"""From a view to batches: each image is decoded and augmented inside the memory of its batch.

Every random choice is a function of (seed, epoch, row, draw), never of a process, a thread or of time: any number of
workers gives the same batches, and a resumed epoch the same as the first try.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from csc.data.augment import Pixels, augment
from csc.data.cores import cores
from csc.data.decode import decode
from csc.data.order import BatchRows, Plan
from csc.data.shards import ImageShards
from csc.data.views import View
from csc.errors import BadData, CscError

__all__ = [
    "Batch",
    "BatchKey",
    "Batches",
    "Workers",
    "image_batches",
    "loaded",
    "workers_for",
]

AHEAD = 3  # batches that a thread has ready before they are asked for
MOST_WORKERS = 8  # processes; at 224 pixels they make about 3,000 images per second
KEPT_BYTES = 256 << 20  # decoded images that may stay in memory from one epoch to the next

Workers = int | Literal["thread"]
BatchKey = tuple[int, BatchRows]  # an epoch, and the rows of a batch in it


@dataclass
class Batch:
    """Images as they were stored, resized: uint8 (B, 3, H, W) in channels-last memory, with their labels.

    Feature maps may stand for them, then float16 (B, channels, h, w).
    """

    images: Tensor
    targets: Tensor  # (B, classes) float
    rows: Tensor  # (B,) row in the view

    def pin_memory(self) -> "Batch":
        """The same batch in memory that a GPU can copy from while the CPU goes on."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.rows.pin_memory())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        images, targets, rows = (part.to(device, non_blocking=True) for part in (self.images, self.targets, self.rows))
        return Batch(images, targets, rows)


class Batches(Iterator[Batch]):
    """Batches in order, and how long their consumer waited for them.

    Attributes:
        waited: seconds spent in `next` so far.
    """

    def __init__(self, source: Generator[Batch, None, None]) -> None:
        self.waited = 0.0
        self._source = source

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.waited += time.perf_counter() - started

    def close(self) -> None:
        """End the thread or the processes behind the batches; happens by itself when nobody holds them any more."""
        self._source.close()


class _ImageBatches:
    """Makes the batch of an epoch and its rows, in a thread or in the processes of a data loader.

    With `keep`, decoded images stay in memory for the next epoch, should all of them fit.
    """

    def __init__(self, view: View, size: int, mode: str, seed: int | None, *, augment: bool, keep: bool) -> None:
        self.shards = ImageShards(view.shards_uri)
        self.positions = view.positions()
        self.targets = view.targets()
        self.size, self.mode, self.seed, self.augment = size, mode, seed, augment
        fits = len(view) * size * size * 3 <= KEPT_BYTES
        self.kept: dict[int, Pixels] | None = {} if keep and fits else None

    def __getitem__(self, key: BatchKey) -> Batch | CscError:
        """A batch, or its error: one that is raised would be wrapped by the data loader in a text of many lines."""
        try:
            return self.batch(key)
        except CscError as error:
            return error

    def batch(self, key: BatchKey) -> Batch:
        """The images of some rows as an epoch shows them.

        First all are decoded, then all are augmented: code that stays in the processor's caches runs faster.
        """
        epoch, shown = key
        rows = shown.rows
        images = torch.empty((len(rows), self.size, self.size, 3), dtype=torch.uint8)
        pixels = images.numpy()
        for target, row in zip(pixels, rows, strict=True):
            target[...] = self._image(row)
        if self.augment:
            for target, row, number in zip(pixels, rows, shown.numbers, strict=True):
                target[...] = augment(target, self._random(epoch, row, number))
        targets = torch.from_numpy(self.targets[rows].astype(np.float32))
        return Batch(images.permute(0, 3, 1, 2), targets, torch.tensor(rows, dtype=torch.int64))

    def _random(self, epoch: int, row: int, draw: int) -> np.random.Generator:
        """The random numbers that decide how a draw in an epoch shows a row."""
        if self.seed is None:
            shard, shard_row = self.positions[row]
            return np.random.default_rng([shard, epoch, shard_row])
        return np.random.default_rng([self.seed, epoch, row + draw * len(self.positions)])  # one number for each pair

    def _image(self, row: int) -> Pixels:
        if self.kept is not None and row in self.kept:
            return self.kept[row]
        position = self.positions[row]
        try:
            pixels = decode(self.shards.jpeg(*position), self.size, self.mode)
        except (OSError, SyntaxError) as error:
            where = self.shards.where(*position)
            raise BadData(f"{where}: broken image ({error}); ingest the data set again") from None
        if self.kept is not None:
            self.kept[row] = pixels
        return pixels


def workers_for(setting: int | Literal["auto"], device: torch.device) -> Workers:
    """What loads the batches: a number of worker processes (0: the training process itself), or a `thread` of it.

    With `auto`, a GPU gets a process for each core but one; the ranks of a node share its cores. On a CPU the network
    needs the cores: a thread loads whenever the network leaves one idle.
    """
    if setting != "auto":
        return setting
    if device.type == "cpu":
        return "thread"
    own = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_WORKERS, own - 1))


def image_batches(
    view: View, plan: Plan, *, seed: int | None, size: int, augment: bool, workers: Workers, mode: str = "fast"
) -> Batches:
    """All batches of some epochs, one after the other; workers live through all of them.

    Args:
        view: which images, with which labels.
        plan: of each epoch its number and its batches.
        seed: of the augmentation, together with epoch, row and draw. None: it depends on the epoch, and on the shard of
            an image and its row there, so that every view of the data set shows an image alike.
        size: of the images.
        augment: whether images are augmented.
        workers: from `workers_for`.
        mode: of `csc.data.decode`.
    """
    keep = len(plan) > 1 and workers in (0, "thread")  # processes would each keep their own
    source = _ImageBatches(view, size, mode, seed, augment=augment, keep=keep)
    keys = ((epoch, batch) for epoch, batches in plan for batch in batches)
    if workers != "thread" and workers > 0:
        return Batches(_from_processes(source, keys, workers, torch.cuda.is_available()))
    return loaded(source.batch, keys, ahead=workers == "thread")


def loaded(load: Callable[[BatchKey], Batch], keys: Iterable[BatchKey], *, ahead: bool) -> Batches:
    """Load batch after batch in this process, `ahead` in a thread next to its consumer; pinned if there is a GPU."""
    pinned = (lambda key: load(key).pin_memory()) if torch.cuda.is_available() else load
    return Batches(_from_thread(pinned, keys) if ahead else (pinned(key) for key in keys))


def _from_processes(
    source: _ImageBatches, keys: Iterable[BatchKey], workers: int, pin: bool
) -> Generator[Batch, None, None]:
    loader: DataLoader[Batch | CscError] = DataLoader(
        source,  # type: ignore[arg-type]  # keys are (epoch, rows)
        batch_size=None,  # an item is a batch already
        sampler=keys,
        num_workers=workers,
        pin_memory=pin,
        generator=torch.Generator(),  # its own: making a loader must not change the random state of the network
    )
    for batch in loader:
        if isinstance(batch, CscError):
            raise batch
        yield batch


def _from_thread(load: Callable[[BatchKey], Batch], keys: Iterable[BatchKey]) -> Generator[Batch, None, None]:
    """Load a few batches ahead; a failure comes out where its batch would have."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
    ready: deque[Future[Batch]] = deque()
    try:
        for key in keys:
            ready.append(pool.submit(load, key))
            if len(ready) > AHEAD:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
