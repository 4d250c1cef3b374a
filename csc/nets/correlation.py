"""The fixed statistical correlation matrix "Z", built as in AGCN from labels and pseudo-labels.

Entry (i, j) starts as P(i | j). Blocks, with h hard labels of the task and s = softmax of the prior model's logits:

    new–new   N_ij / N_j                          counted in the labels
    old–new   Σ_{images with j} s_i / N_j         soft scores of old classes where a new one is labelled
    new–old   P(i | j) P(j) / P(i) / 2            Bayes' rule on the block above
    old–old   the matrix of the task before
"""

import torch
from torch import Tensor

__all__ = ["statistical_cm"]

HARD_THRESHOLD, MIXED_THRESHOLD = 0.4, 0.3
COLUMN_WEIGHT, COLUMN_WEIGHT_BASE = 0.25, 0.28
EXPONENT, EXPONENT_BASE = 0.5, 0.8
TINY = 1e-6


def statistical_cm(labels: Tensor, prior_logits: Tensor | None = None, prior_cm: Tensor | None = None) -> Tensor:
    """Build Z for the classes seen so far.

    Args:
        labels: hard labels of the task's new classes (images, new).
        prior_logits: of the prior model on the same images (images, old); without them old and new stay unlinked.
        prior_cm: Z of the task before (old, old); none in the base task.
    """
    labels = labels.float()
    counts = labels.sum(0) + TINY  # N_j
    base = prior_cm is None
    together = (labels.T @ labels) / counts  # column j: P(i | j)
    together.fill_diagonal_(0)
    hard = _normalised(_weighted(together > HARD_THRESHOLD, base), base)
    if prior_cm is None:
        return hard
    old = len(prior_cm)
    matrix = torch.zeros(old + len(hard), old + len(hard))
    matrix[:old, :old] = prior_cm
    matrix[old:, old:] = hard
    if prior_logits is not None:
        scores = prior_logits.float().softmax(dim=1)
        old_new = scores.T @ labels / counts  # (old, new)
        new_old = (old_new * (counts / len(labels))).T / (scores.mean(0) + TINY) / 2
        matrix[:old, old:] = _weighted(old_new > MIXED_THRESHOLD, base)
        matrix[old:, :old] = _weighted(new_old > MIXED_THRESHOLD, base)
    return matrix


def _weighted(edges: Tensor, base: bool) -> Tensor:
    """Give the edges of each column a fixed total weight."""
    weight = COLUMN_WEIGHT_BASE if base else COLUMN_WEIGHT
    return edges.float() * weight / (edges.float().sum(0) + TINY)


def _normalised(weights: Tensor, base: bool) -> Tensor:
    """Add self-loops and scale by degrees: D^-e Aᵀ D^-e, with D the row sums."""
    matrix = weights + torch.eye(len(weights))
    scale = matrix.sum(1) ** -(EXPONENT_BASE if base else EXPONENT)
    return scale[:, None] * matrix.T * scale
