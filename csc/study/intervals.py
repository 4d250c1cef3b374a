"""How sure a difference between two methods is, given a few seeds and a limited number of test images.

Two things could have come out otherwise: training, had the seeds been others, and testing, had the images been others.
Both runs of a pair have the same seed and see the same resampled images, so what they share cancels.

    seeds    the mean of n differences has the error s / √n · t(n-1), where s is their sample deviation
    images   the difference is computed again on test images drawn with replacement (bootstrap)

The interval holds the middle 95 % of sums of both. With one seed it is of the images alone, and without stored scores
of the seeds alone.
"""

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csc.data.scores import Scores

__all__ = ["Interval", "difference", "resampled_map"]

ResampledValues = NDArray[np.float64]  # a number on each of the resampled sets of images

_SEED = 2024  # of all draws: the same runs give the same interval
_DRAWS = 20_000  # of the sum of both errors
_WORK = 400_000_000  # (image, class) pairs to look at; large test sets are drawn less often


@dataclass(frozen=True)
class Interval:
    """A difference, and where it lies with 95 % confidence; `low` and `high` are None if nothing is known of that."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    images: int  # 0 if only the seeds were looked at

    @property
    def verdict(self) -> str:
        """`above`, `below`, `level` if zero is within, or `open` if there is no interval."""
        if self.low is None or self.high is None:
            return "open"
        return "above" if self.low > 0 else "below" if self.high < 0 else "level"


def difference(
    pairs: Sequence[tuple[float, float]],
    resampled: Sequence[tuple[ResampledValues, ResampledValues]] = (),
    images: int = 0,
) -> Interval:
    """The mean difference of pairs of numbers, first minus second, with its interval.

    There is a pair for each seed; `resampled` are the same numbers on resampled test images, if they are known.
    """
    differences = [first - second for first, second in pairs]
    mean, seeds = statistics.fmean(differences), len(pairs)
    generator = np.random.default_rng(_SEED)
    error = np.zeros(_DRAWS)
    if seeds > 1:
        error += statistics.stdev(differences) / seeds**0.5 * generator.standard_t(seeds - 1, _DRAWS)
    if resampled:
        of_images = np.mean([first - second for first, second in resampled], axis=0)
        error += generator.choice(of_images - of_images.mean(), _DRAWS)
    elif seeds < 2:
        return Interval(mean, None, None, seeds, 0)
    low, high = np.quantile(mean + error, [0.025, 0.975])
    return Interval(mean, float(low), float(high), seeds, images if resampled else 0)


def resampled_map(scores: Scores) -> ResampledValues:
    """The mAP in percent on test images drawn with replacement, once for each draw.

    The draws depend on the number of images alone, so the results of two runs on the same test images can be paired.
    The average precision is that of `csc.metrics`: images with equal scores count together.
    """
    images, classes = scores.confidences.shape
    weights = _weights(images, int(np.clip(_WORK // (images * classes), 200, 1000)))
    total = np.zeros(weights.shape[1])
    for confidences, present in zip(scores.confidences.T, scores.targets.T, strict=True):
        total += _weighted_precision(confidences, present, weights)
    found: ResampledValues = 100 * total / classes
    return found


@functools.lru_cache(maxsize=1)
def _weights(images: int, draws: int) -> NDArray[np.float32]:
    """How often each image is drawn (images, draws)."""
    generator = np.random.default_rng(_SEED)
    counts = [np.bincount(generator.integers(images, size=images), minlength=images) for _ in range(draws)]
    return np.stack(counts, axis=1).astype(np.float32)


def _weighted_precision(
    confidences: NDArray[np.float32], present: NDArray[np.bool_], weights: NDArray[np.float32]
) -> ResampledValues:
    """The average precision of a class in each draw; 0 where no image shows it.

    How many images are above is only needed at the scores of positives, so the images between two of them are summed up
    first: few rows are left to accumulate.
    """
    levels = np.unique(confidences[present])[::-1]  # falling scores of positives
    if not levels.size:
        return np.zeros(weights.shape[1])
    level = np.searchsorted(-levels, -confidences)  # the first that an image reaches; below them all it never counts
    everything, positives = (_summed(level, rows, weights) for rows in (level < levels.size, present))
    precision = np.cumsum(positives, axis=0) / np.maximum(np.cumsum(everything, axis=0), 1)
    found: ResampledValues = (positives * precision).sum(axis=0) / np.maximum(positives.sum(axis=0), 1)
    return found


def _summed(level: NDArray[np.intp], chosen: NDArray[np.bool_], weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """The weights of the chosen images summed by level (levels, draws); each level has at least one."""
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(level[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(level[rows], prepend=-1))
    return np.add.reduceat(weights[rows], starts, axis=0).astype(np.float64)
