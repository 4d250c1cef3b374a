"""Which images a memory keeps: pure choices among feature vectors and multi-hot labels.

Herding orders the images of one class. The others watch a stream: they start from `held` (what the memory has, at most
`slots`) and see `arriving` (what comes, in order), and give the indices to keep of both, one after the other. Of PRS
and OCDM, `counts` says how often each class was in the stream before (a class in `held` or `arriving` counts as seen),
`rho` is that of the target `shares`, and each image has one label at least.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Balance", "Rows", "admission", "herding", "leaving", "ocdm", "prs", "reservoir", "shares"]

Labels = NDArray[np.bool_]  # (images, classes)
Rows = NDArray[np.intp]

MOST_ITERATIONS = 1000  # of herding, which may come back to the same images for ever
BATCH = 64  # images that arrive together


def herding(features: NDArray[np.floating], k: int) -> Rows:
    """Order images so that the mean of the first few is near the mean of all; the first k (iCaRL).

    With unit features d_i and their mean μ: w ← μ; pick argmax ⟨w, d_i⟩; w ← w + μ − d_pick. An image that was picked
    before is not taken twice, but moves w again. Only inner products are kept: ⟨w, d_i⟩ of all images moves by ⟨μ, d_i⟩
    − ⟨d_pick, d_i⟩.
    """
    wanted = min(k, len(features))
    if wanted == 0:
        return np.empty(0, np.intp)
    norms = np.sqrt(np.einsum("id,id->i", features, features))
    scale = 1 / np.maximum(norms, np.finfo(features.dtype).tiny)  # d_i = scale_i f_i, without a copy of the features
    towards_mean = scores = scale * (features @ (scale @ features / len(features)))
    towards_picked: dict[int, NDArray[np.floating]] = {}
    for _ in range(MOST_ITERATIONS):
        if len(towards_picked) >= wanted:
            break
        pick = int(scores.argmax())
        if pick not in towards_picked:
            towards_picked[pick] = scale * (features @ (scale[pick] * features[pick]))
        scores = scores + towards_mean - towards_picked[pick]
    return np.array(list(towards_picked), dtype=np.intp)


def reservoir(held: int, arriving: int, seen: int, slots: int, rng: np.random.Generator) -> Rows:
    """A uniform sample of the stream: image i of it, from 0, replaces slot r ~ U{0..i} if there is such a slot.

    `held` and `arriving` are numbers of images here; `seen` is how many were in the stream before.
    """
    fill = min(slots - held, arriving)
    kept = np.arange(held + fill)
    late = np.arange(fill, arriving)
    slot = rng.integers(0, seen + late + 1)
    enters = slot < slots
    kept[slot[enters]] = held + late[enters]  # of several for one slot the last one stays
    return kept


def shares(counts: NDArray[np.integer], rho: float) -> NDArray[np.float64]:
    """How a memory should be divided among the classes: n_j^ρ / Σ n_k^ρ over those seen; ρ = 0 is evenly.

    >>> shares(np.array([4, 0, 1]), 0.5)
    array([0.66666667, 0.        , 0.33333333])
    """
    powers = np.where(counts > 0, np.maximum(counts, 1).astype(np.float64) ** rho, 0.0)
    share: NDArray[np.float64] = powers / np.maximum(powers.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return share


def prs(
    held: Labels, arriving: Labels, counts: NDArray[np.int64], slots: int, rho: float, rng: np.random.Generator
) -> Rows:
    """Partitioning reservoir sampling: rare classes enter more often, over-represented ones leave."""
    labels = np.concatenate([held, arriving])
    counts = np.maximum(counts, held.sum(axis=0))
    kept = np.arange(len(held))
    for start in range(0, len(arriving), BATCH):
        batch = arriving[start : start + BATCH]
        running = counts + np.cumsum(batch, axis=0)
        enters = rng.random(len(batch)) < admission(batch, running, slots, rho)
        enters[: slots - len(kept)] = True
        for row in np.flatnonzero(enters):
            index = len(held) + start + row
            if len(kept) < slots:
                kept = np.append(kept, index)
            else:
                kept[leaving(labels[kept], shares(running[row], rho), rng)] = index
        counts = running[-1]
    return kept


def admission(labels: Labels, counts: NDArray[np.int64], slots: int, rho: float) -> NDArray[np.float64]:
    """Chance of each image to enter a full memory: s = Σ_{j∈Y} w_j min(1, M π_j / n_j), w = softmax of −n_j over Y.

    Y are its labels, M the slots, π the target shares, and n_j (images, classes) the counts up to and with each image.
    """
    rarest = np.where(labels, counts, np.iinfo(np.int64).max).min(axis=1, keepdims=True)
    weights = np.where(labels, np.exp(np.minimum(rarest - counts, 0)), 0.0)
    chances = np.minimum(1, slots * shares(counts, rho) / np.maximum(counts, 1))
    chance: NDArray[np.float64] = (weights * chances).sum(axis=1) / weights.sum(axis=1)
    return chance


def leaving(stored: Labels, target: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Which of the stored images makes room.

    With l_j images of class j, L = Σ l_j and the excess δ_j = l_j − π_j L: draw a class from softmax(δ). Of its images
    take those with the fewest labels of classes that are short (δ ≤ 0), and of them one without which Σ |l_j − π_j L|
    is smallest.
    """
    held = stored.sum(axis=0)
    excess = held - target * held.sum()
    odds = np.exp(np.where(held > 0, excess - excess[held > 0].max(), -np.inf))
    drawn = rng.choice(len(held), p=odds / odds.sum())
    candidates = np.flatnonzero(stored[:, drawn])
    short = stored[candidates][:, excess <= 0].sum(axis=1)
    candidates = candidates[short == short.min()]
    left = held - stored[candidates]
    misfit = np.abs(left - target * left.sum(axis=1, keepdims=True)).sum(axis=1)
    return int(rng.choice(candidates[misfit == misfit.min()]))


def ocdm(held: Labels, arriving: Labels, counts: NDArray[np.int64], slots: int, rho: float) -> Rows:
    """Optimising class distribution in memory: add batch after batch, and drop images one by one until the rest fits.

    Dropped is the image without which the class distribution is closest to its target.
    """
    labels = np.concatenate([held, arriving])
    counts = np.maximum(counts, held.sum(axis=0))
    kept = np.arange(len(held))
    for start in range(len(held), len(labels), BATCH):
        batch = np.arange(start, min(start + BATCH, len(labels)))
        counts = counts + labels[batch].sum(axis=0)
        kept = np.concatenate([kept, batch])
        balance = Balance(labels[kept], shares(counts, rho))
        for _ in range(len(kept) - slots):
            balance.drop(int(balance.without().argmin()))
        kept = kept[balance.left]
    return kept


class Balance:
    """How far the classes of some images are from their target shares, while images are dropped one by one.

    With c_j images of class j, L = Σ c_j and S = Σ c_j (log c_j − log p*_j), KL(c / L ‖ p*) = S / L − log L. Without
    image i, S changes by Σ_{j∈Y_i} d_j with d_j = (c_j − 1) log(c_j − 1) − c_j log c_j + log p*_j. These sums are kept
    for all images: a drop moves d of a few classes only.
    """

    def __init__(self, labels: Labels, target: NDArray[np.float64]) -> None:
        self.left = np.ones(len(labels), dtype=bool)
        self._present = np.asfortranarray(labels, dtype=np.float64)  # read by classes
        self._sizes = self._present.sum(axis=1)
        self._counts = self._present.sum(axis=0)
        self._log_target = np.log(target, where=target > 0, out=np.zeros_like(target))
        self._sum = float((_xlogx(self._counts) - self._counts * self._log_target).sum())
        self._steps = self._step(slice(None))
        self._changes = self._present @ self._steps

    def without(self) -> NDArray[np.float64]:
        """KL(class distribution of the others ‖ target) for every image; infinite for those dropped."""
        others = np.maximum(self._counts.sum() - self._sizes, 1)
        divergence: NDArray[np.float64] = (self._sum + self._changes) / others - np.log(others)
        return divergence

    def drop(self, image: int) -> None:
        """Go on without an image."""
        own = np.flatnonzero(self._present[image])
        self.left[image] = False
        self._sum += self._changes[image]
        self._counts[own] -= 1
        steps = self._step(own)
        self._changes += self._present[:, own] @ (steps - self._steps[own])
        self._changes[image] = np.inf
        self._steps[own] = steps

    def _step(self, classes: Rows | slice) -> NDArray[np.float64]:
        counts = self._counts[classes]
        return _xlogx(counts - 1) - _xlogx(counts) + self._log_target[classes]


def _xlogx(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return counts * np.log(np.maximum(counts, 1))  # of whole numbers; 0 log 0 is 0
