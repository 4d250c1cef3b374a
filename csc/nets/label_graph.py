"""AGCN's label graph: class vectors that two graph convolutions mix into classifiers (Du et al., ICME 2022).

With word vectors E of the classes and the statistical correlation matrix Z,

    H = Z (σ(Z E W₁) W₂),     z = max-pooled F · Hᵀ,     σ = LeakyReLU(0.2)

Both E and Z are buffers: they travel with the model and no gradient changes them.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from csc.nets.head import Head

__all__ = ["WORD_VECTOR", "LabelGraph"]

WORD_VECTOR = 300
SLOPE = 0.2


class LabelGraph(Head):
    """A head whose classifiers come from a graph over the class names."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.register_buffer("embeddings", torch.randn(classes, WORD_VECTOR) / WORD_VECTOR**0.5)
        self.register_buffer("statistical_cm", torch.eye(classes))
        self.W_1 = nn.Parameter(torch.empty(WORD_VECTOR, width).uniform_(-(width**-0.5), width**-0.5))
        self.W_2 = nn.Parameter(torch.empty(width, channels).uniform_(-(channels**-0.5), channels**-0.5))

    def resized(self, classes: int) -> "LabelGraph":
        """See `Head`."""
        return LabelGraph(self.channels, classes, self.width)

    def correlation(self) -> tuple[str, Tensor]:
        """See `Head`."""
        return "Z", cast(Tensor, self.statistical_cm)

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the classifiers H as every image sees them (B, classes, channels)."""
        Z, E = cast(Tensor, self.statistical_cm), cast(Tensor, self.embeddings)
        H = Z @ (leaky_relu(Z @ (E @ self.W_1), SLOPE) @ self.W_2)
        return maps.amax(dim=(2, 3)) @ H.T, H.expand(len(maps), -1, -1)
