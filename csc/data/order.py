"""Which rows of a view the batches of an epoch show, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Draw", "Plan", "draw_exemplars", "epoch_batches", "rows_and_draws", "task_seed"]


@dataclass(frozen=True)
class Draw:
    """Rows of a view that come into a batch together.

    Attributes:
        number: 0 in the pass over the view. An exemplar may be drawn several times in an epoch: each draw then has a
            number of its own, and shows its rows with an augmentation of its own.
    """

    rows: Sequence[int]
    number: int = 0


Plan = Sequence[tuple[int, Sequence[Sequence[Draw]]]]  # of each epoch its number and its batches


def rows_and_draws(draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
    """The rows of a batch, one after the other, and of each the number of its draw."""
    return [row for draw in draws for row in draw.rows], [draw.number for draw in draws for _ in draw.rows]


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
