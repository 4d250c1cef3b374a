"""What a task is learned from: its images, and the exemplars of earlier tasks."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csc.config.schema import Config
from csc.data.loading import Batches
from csc.data.order import BatchRows, Draw, draw_exemplars, epoch_batches, task_seed
from csc.data.views import View
from csc.distributed.group import Group
from csc.replay.memory import Memory, joined
from csc.training.batches import load_batches
from csc.training.inference import apply_to_rows

__all__ = ["Examples"]


@dataclass
class Examples:
    """The images of a task followed by exemplars, and their batches, of which each process loads its shard."""

    config: Config
    task_view: View
    task: int
    memory: Memory | None  # exemplars of earlier tasks, as this task may see them
    replay_batches: int  # of exemplars that are drawn with each batch of the task, if they are not mixed into it
    maps_uri: str  # uri of cached feature maps that replace the images; none if empty
    group: Group

    def __post_init__(self) -> None:
        self.task_rows = len(self.task_view)
        self.view = self.task_view if self.memory is None else joined(self.task_view, self.memory)  # what is shown
        self.seed = task_seed(self.config.seed, self.task)

    @property
    def exemplars(self) -> range:
        """The rows of exemplars."""
        return range(self.task_rows, len(self.view))

    @property
    def images_per_epoch(self) -> int:
        """How many images an epoch shows: the task's, and exemplars unless they are drawn with each batch."""
        return self.task_rows if self.config.memory.replay == "batch" else len(self.view)

    def epoch_rows(self, epoch: int) -> list[BatchRows]:
        """The rows of each batch of an epoch, and the exemplars that are drawn with them."""
        settings, batch_size = self.config.memory, self.config.train.batch_size
        shuffle = not self.config.release_quirks.no_shuffle
        passed = epoch_batches(self.images_per_epoch, batch_size, self.seed, epoch, shuffle=shuffle)
        if self.memory is None or settings.replay != "batch":
            return [BatchRows(rows) for rows in passed]
        size, number = min(settings.batch_size or batch_size, len(self.exemplars)), self.replay_batches
        draws = iter(draw_exemplars(self.exemplars, size, len(passed) * number, self.seed, epoch))
        return [BatchRows(rows, tuple(itertools.islice(draws, number))) for rows in passed]

    def batches(self, epochs: range, skip: int = 0) -> Batches:
        """This process's shard of all batches of the given epochs, but for the first ones, which an earlier try had."""
        plan = [(epoch, [self._shard(batch) for batch in self.epoch_rows(epoch)]) for epoch in epochs]
        if skip:
            plan[0] = (plan[0][0], plan[0][1][skip:])
        device, augment = self.group.device, self.config.input.augment
        return load_batches(self.view, plan, self.config, self.maps_uri, device, seed=self.seed, augment=augment)

    def _shard(self, batch: BatchRows) -> BatchRows:
        shard = self.group.shard
        return BatchRows(shard(batch.own), tuple(Draw(shard(draw.rows), draw.number) for draw in batch.draws))

    def apply(self, function: Callable[[Tensor], Tensor], rows: Sequence[int]) -> Tensor:
        """What a function of images returns for some rows, without augmentation; all of it in every process."""
        batches = apply_to_rows(function, self.view, rows, self.config, self.maps_uri, self.group)
        return torch.cat([values for _, values in batches])
