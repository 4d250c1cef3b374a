"""The head of methods that solve for their weights instead of descending to them.

With v the pooled feature map (its mean, the root of its mean, or mean and maximum side by side):

    h = (v - μ) / σ                    or, with `hidden` > 0, random features ReLU(W_r (v - μ) / σ)
    z = W h + b                        what least squares gives, near 0 and 1
    logit = 8 tanh((scale · z + shift) / 8)     class by class, so that sigmoid(logit) is a probability

The bound keeps sigmoids apart: in single precision they are all 1 from logits of 17 on, and tie.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from csc.nets.head import Head

if TYPE_CHECKING:
    from csc.methods.ridge import RidgeSettings

__all__ = ["AnalyticHead"]

BOUND = 8.0  # of logits
TINY = 1e-6  # σ of a feature that never changes


class AnalyticHead(Head):
    """Pooled features, standardised and possibly expanded, and a linear layer whose weights are solved for.

    W_r is uniform in ±1/√D, as PyTorch initialises linear layers, and follows from the seed alone.
    """

    def __init__(self, channels: int, classes: int, settings: "RidgeSettings", seed: int) -> None:
        super().__init__()
        self.channels, self.settings, self.seed = channels, settings, seed
        pooled = 2 * channels if settings.pooling == "mean_max" else channels
        self.register_buffer("mean", torch.zeros(pooled))
        self.register_buffer("std", torch.ones(pooled))
        if settings.hidden:
            generator = torch.Generator().manual_seed(seed)
            uniform = torch.rand(settings.hidden, pooled, generator=generator)
            self.register_buffer("expansion", (2 * uniform - 1) * pooled**-0.5)
        self.linear = nn.Linear(settings.hidden or pooled, classes)
        self.register_buffer("scale", torch.ones(classes))
        self.register_buffer("shift", torch.zeros(classes))

    def resized(self, classes: int) -> "AnalyticHead":
        """A head with the same settings and fresh weights for another number of classes."""
        return AnalyticHead(self.channels, classes, self.settings, self.seed)

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and h (B, hidden or features) that they are read from."""
        h = self.expanded(self.pooled(maps))
        log_odds = self.linear(h) * cast(Tensor, self.scale) + cast(Tensor, self.shift)
        return BOUND * (log_odds / BOUND).tanh(), h

    def pooled(self, maps: Tensor) -> Tensor:
        """(B, channels, h, w) → v (B, D)."""
        mean = maps.mean(dim=(2, 3))
        if self.settings.pooling == "root":
            return mean.sign() * mean.abs().sqrt()
        return torch.cat([mean, maps.amax(dim=(2, 3))], dim=1) if self.settings.pooling == "mean_max" else mean

    def standardise(self, pooled: Tensor) -> None:
        """Take μ and σ from some images (images, D)."""
        cast(Tensor, self.mean).copy_(pooled.double().mean(dim=0))
        cast(Tensor, self.std).copy_(pooled.double().std(dim=0, correction=0) + TINY)

    @torch.no_grad()
    def load(self, W: Tensor, scale: Tensor, shift: Tensor) -> None:
        """Take weights (features of h, then the constant; classes), and what turns z into log-odds (classes,)."""
        self.linear.weight.copy_(W[:-1].T)
        self.linear.bias.copy_(W[-1])
        cast(Tensor, self.scale).copy_(scale)
        cast(Tensor, self.shift).copy_(shift)

    def expanded(self, pooled: Tensor) -> Tensor:
        """Pooled features v (B, D) → h (B, `hidden` or D)."""
        standard = (pooled - cast(Tensor, self.mean)) / cast(Tensor, self.std)
        return linear(standard, cast(Tensor, self.expansion)).relu() if self.settings.hidden else standard
