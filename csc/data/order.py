"""Which rows of a view the batches of an epoch show, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BatchRows", "Draw", "Plan", "draw_exemplars", "epoch_batches", "task_seed"]


@dataclass(frozen=True)
class Draw:
    """Exemplars that are drawn together, in addition to a pass over a view.

    Attributes:
        rows: of the exemplars in the view.
        number: from 1. An exemplar may be drawn several times in an epoch; each draw shows it with an augmentation of
            its own.
    """

    rows: Sequence[int]
    number: int


@dataclass(frozen=True)
class BatchRows:
    """Which rows of a view a batch shows: some of a pass over the view, then those of each draw of exemplars."""

    own: Sequence[int]
    draws: tuple[Draw, ...] = ()

    @property
    def parts(self) -> list[Sequence[int]]:
        """The rows of the pass, and those of each draw."""
        return [self.own, *(draw.rows for draw in self.draws)]

    @property
    def rows(self) -> list[int]:
        """All rows, one after the other."""
        return [row for part in self.parts for row in part]

    @property
    def numbers(self) -> list[int]:
        """Of each row the number of its draw, 0 in the pass over the view."""
        return [0] * len(self.own) + [draw.number for draw in self.draws for _ in draw.rows]


Plan = Sequence[tuple[int, Sequence[BatchRows]]]  # of each epoch its number and its batches


def task_seed(seed: int, task: int) -> int:
    """The seed of a task, one for each seed of a run and number of a task below 1,000."""
    return seed * 1_000 + task


def epoch_batches(count: int, batch_size: int, seed: int, epoch: int, *, shuffle: bool = True) -> list[list[int]]:
    """The rows of each batch of an epoch; a last batch of one image is left out, batch-norm cannot use it."""
    rows = np.random.default_rng([seed, epoch]).permutation(count) if shuffle else np.arange(count)
    batches = [rows[start : start + batch_size].tolist() for start in range(0, count, batch_size)]
    return batches[:-1] if len(batches) > 1 and len(batches[-1]) == 1 else batches


def draw_exemplars(rows: range, size: int, draws: int, seed: int, epoch: int) -> list[Draw]:
    """So many draws of `size` rows, each without repetition; numbered from 1."""
    random = np.random.default_rng([seed, epoch, 2])
    chosen = (random.choice(len(rows), size, replace=False) + rows.start for _ in range(draws))
    return [Draw(each.tolist(), number) for number, each in enumerate(chosen, start=1)]
