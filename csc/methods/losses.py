"""Loss functions on multi-label logits, as pure functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["asymmetric_loss", "binary_cross_entropy", "max_entropy", "quadratic_penalty"]


def max_entropy(logits: Tensor, form: str = "one_sided", reduction: str = "sum") -> Tensor:
    """L_H, eq. 6 of the paper: the mean over images of Σ -p ln p over classes.

    It is largest at p = 1/e: it lowers confident predictions and lifts tiny ones. Other readings are the two-sided
    `binary` entropy, and the mean over classes instead of their sum.
    """
    p = logits.sigmoid()
    entropy = -p * (p + 1e-5).log()
    if form == "binary":
        entropy = entropy - (1 - p) * (1 - p + 1e-5).log()
    return (entropy.sum(dim=1) if reduction == "sum" else entropy.mean(dim=1)).mean()


def binary_cross_entropy(logits: Tensor, targets: Tensor, known: Tensor | None = None) -> Tensor:
    """Mean over images and classes of -[y log p + (1-y) log(1-p)]; targets may be soft.

    With `known`, the sum over the entries that it marks, divided by how many it marks; 0 if it marks none. It may have
    more rows than the logits: those of the other batches of an accumulated update.
    """
    if known is None:
        return binary_cross_entropy_with_logits(logits, targets)
    weight = known[: len(logits)].to(logits.dtype)
    total = binary_cross_entropy_with_logits(logits, targets, weight=weight, reduction="sum")
    return total / known.sum().clamp(min=1)


def asymmetric_loss(logits: Tensor, targets: Tensor, known: Tensor | None = None) -> Tensor:
    """Sum over images and (known) classes of -[y log p + (1-y) p_m⁴ log(1-p_m)] with p_m = max(p - 0.05, 0).

    The focusing weight p_m⁴ carries no gradient; γ₊, the exponent for present labels, is 0.
    """
    p = logits.sigmoid()
    negative = (1 - p + 0.05).clamp(max=1)  # 1 - p_m
    likelihood = targets * p.clamp(min=1e-8).log() + (1 - targets) * negative.clamp(min=1e-8).log()
    with torch.no_grad():
        certainty = targets * p + (1 - targets) * negative
        weight = (1 - certainty) ** (4 * (1 - targets))
        if known is not None:
            weight = weight * known[: len(logits)]
    return -(likelihood * weight).sum()


def quadratic_penalty(fishers: Sequence[Tensor], stars: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Σ F (θ - θ*)² over all parameters."""
    total: Tensor = _QuadraticPenalty.apply(fishers, stars, *parameters)
    return total


class _QuadraticPenalty(Function):
    """Σ F (θ - θ*)² over all parameters; F (θ - θ*), half its gradient, is kept, so that backward is one product."""

    @staticmethod
    def forward(ctx: Any, fishers: Sequence[Tensor], stars: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        total = parameters[0].new_zeros(())
        pulls = []
        for fisher, star, value in zip(fishers, stars, parameters, strict=True):
            away = value - star
            pulls.append(fisher * away)
            total += away.mul_(pulls[-1]).sum()
        ctx.save_for_backward(*pulls)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(2 * gradient * pull for pull in ctx.saved_tensors)
