"""Backbone and head together: images in, logits of the seen classes out."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from csc.config import Config
from csc.nets.backbone import Backbone, StoredBackbone
from csc.nets.ci_gcn import CIGCN
from csc.nets.linear import LinearHead

__all__ = ["Network", "build_head"]


class Network(nn.Module):
    """`head(features(images))`; the seam between the two is where cached feature maps come in."""

    def __init__(
        self, backbone: Backbone | StoredBackbone, head: nn.Module, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1) * 255, persistent=False)

    def features(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) → last feature map of the backbone; maps pass as they are."""
        if images.is_floating_point():
            return images.float()
        normalised = (images - cast(Tensor, self.mean)) / cast(Tensor, self.std)
        return cast(Tensor, self.backbone(normalised))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images, or feature maps in their place → logits (B, classes)."""
        return cast(Tensor, self.head(self.features(images)))


def build_head(config: Config, features: int, classes: int) -> nn.Module:
    """The head that the configuration names."""
    return CIGCN(features, classes, config.cigcn) if config.head == "ci_gcn" else LinearHead(features, classes)
