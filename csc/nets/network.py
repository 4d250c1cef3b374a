"""Backbone and head together: images in, logits of the seen classes out."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from csc.nets.backbone import Backbone, StoredBackbone
from csc.nets.head import Head
from csc.nets.prompts import PromptedBackbone

__all__ = ["Network", "Outputs"]


class Outputs(NamedTuple):
    """Logits of a network, and what it computes on the way to them."""

    logits: Tensor  # (B, n)
    representation: Tensor  # that the head reads its logits from: pooled features, class nodes or task embeddings
    stages: tuple[Tensor, ...]  # outputs of the backbone's stages, the last being the maps; only the maps if cached
    pull: Tensor | None  # (B,) of a pool of prompts: similarity to the chosen keys

    def rows(self, rows: slice) -> "Outputs":
        """The outputs of some of the images."""
        stages = tuple(stage[rows] for stage in self.stages)
        pull = None if self.pull is None else self.pull[rows]
        return Outputs(self.logits[rows], self.representation[rows], stages, pull)


class Network(nn.Module):
    """`head(features(images))`; on a stored backbone, cached feature maps come instead of images."""

    def __init__(
        self,
        backbone: Backbone | StoredBackbone | PromptedBackbone,
        head: Head,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1) * 255, persistent=False)

    def features(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) → last feature maps (B, channels, h, w)."""
        return cast(Tensor, self.backbone(self._normalised(images)))

    def forward(self, images: Tensor, intermediates: bool = False) -> Tensor | Outputs:
        """uint8 images → logits (B, classes), or all `Outputs`."""
        if not intermediates:
            return cast(Tensor, self.head(self.features(images)))
        seen = self.backbone.intermediates(self._normalised(images))
        logits, representation = self.head.logits_and_features(seen.maps)
        return Outputs(logits, representation, seen.stages, seen.pull)

    def on_maps(self) -> "Network":
        """The same head in a network that takes `features(images)` instead of images."""
        stored = StoredBackbone({}, self.backbone.channels)
        return Network(stored, self.head, (0,), (1,)).to(cast(Tensor, self.mean).device)

    def _normalised(self, images: Tensor) -> Tensor:
        if isinstance(self.backbone, StoredBackbone):
            return images  # maps
        return (images - cast(Tensor, self.mean)) / cast(Tensor, self.std)
