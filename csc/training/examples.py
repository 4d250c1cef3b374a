"""What a task is learned from: its images, and the exemplars of earlier tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csc.config.schema import Config
from csc.data.loading import Batches
from csc.data.order import Draw, draw_exemplars, epoch_batches, task_seed
from csc.data.views import View
from csc.distributed.group import Group
from csc.replay.memory import Memory, joined
from csc.training.batches import load_batches
from csc.training.inference import outputs

__all__ = ["Examples"]


@dataclass
class Examples:
    """The images of a task followed by exemplars, and their batches, of which each process loads its shard."""

    config: Config
    view: View  # of the task; with the exemplars once this is made
    task: int
    memory: Memory | None  # exemplars of earlier tasks, as this task may see them
    replay_batches: int  # of exemplars that are drawn with each batch of the task, if they are not mixed into it
    features: str  # uri of cached feature maps that replace the images; none if empty
    group: Group

    def __post_init__(self) -> None:
        self.task_rows = len(self.view)  # rows of the task itself; exemplars come after them
        self.seed = task_seed(self.config.seed, self.task)
        if self.memory is not None:
            self.view = joined(self.view, self.memory)

    @property
    def exemplars(self) -> range:
        """The rows of exemplars."""
        return range(self.task_rows, len(self.view))

    @property
    def images_per_epoch(self) -> int:
        """How many images an epoch shows: the task's, and exemplars unless they are drawn with each batch."""
        return self.task_rows if self.config.memory.replay == "batch" else len(self.view)

    def epoch_draws(self, epoch: int) -> list[list[Draw]]:
        """Of each batch of an epoch the rows, and the exemplars that are drawn with them."""
        settings, batch_size = self.config.memory, self.config.train.batch_size
        shuffle = not self.config.release_quirks.no_shuffle
        batches_of_rows = epoch_batches(self.images_per_epoch, batch_size, self.seed, epoch, shuffle=shuffle)
        batches = [[Draw(rows)] for rows in batches_of_rows]
        if self.memory is not None and settings.replay == "batch":
            size = min(settings.batch_size or batch_size, len(self.exemplars))
            drawn = iter(draw_exemplars(self.exemplars, size, len(batches) * self.replay_batches, self.seed, epoch))
            for batch in batches:
                batch += [next(drawn) for _ in range(self.replay_batches)]
        return batches

    def batches(self, epochs: range, skip: int = 0) -> Batches:
        """This process's shard of all batches of the given epochs, but for the first ones, which an earlier try had."""
        plan = [(epoch, [self._shard(batch) for batch in self.epoch_draws(epoch)]) for epoch in epochs]
        if skip:
            plan[0] = (plan[0][0], plan[0][1][skip:])
        device, augment = self.group.device, self.config.input.augment
        return load_batches(self.view, plan, self.config, self.features, device, seed=self.seed, augment=augment)

    def _shard(self, batch: Sequence[Draw]) -> list[Draw]:
        return [Draw(self.group.shard(draw.rows), draw.number) for draw in batch]

    def outputs(self, function: Callable[[Tensor], Tensor], rows: Sequence[int]) -> Tensor:
        """What a function of images returns for some rows, without augmentation; all of it in every process."""
        found = outputs(function, self.view, rows, self.config, self.features, self.group)
        return torch.cat([values for _, values in found])
