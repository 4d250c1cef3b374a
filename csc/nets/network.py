"""Backbone and head together: images in, logits of the seen classes out."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from csc.config.schema import Config
from csc.nets.attention import IncrementalCrossAttention
from csc.nets.backbone import Backbone, Inside, StoredBackbone
from csc.nets.ci_gcn import CIGCN
from csc.nets.label_graph import LabelGraph
from csc.nets.linear import LinearHead
from csc.nets.prompts import PromptedBackbone

__all__ = ["Network", "Outputs", "build_head", "with_prompts"]


class Outputs(NamedTuple):
    """What a network says, and what it says it from."""

    logits: Tensor  # (B, n)
    representation: Tensor  # that the head reads its logits from: pooled features, class nodes or task embeddings
    stages: tuple[Tensor, ...]  # outputs of the backbone's stages, the last being the maps; only the maps if cached
    pull: Tensor | None  # (B,) of a pool of prompts: similarity to the chosen keys


class Network(nn.Module):
    """`head(features(images))`; the seam between the two is where cached feature maps come in."""

    def __init__(
        self,
        backbone: Backbone | StoredBackbone | PromptedBackbone,
        head: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1) * 255, persistent=False)

    def features(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, H, W) → last feature map of the backbone; maps pass as they are."""
        if images.is_floating_point():
            return images.float()
        return cast(Tensor, self.backbone(self._normalised(images)))

    def forward(self, images: Tensor, inside: bool = False) -> Tensor | Outputs:
        """uint8 images, or feature maps in their place → logits (B, classes), or all `Outputs`."""
        if not inside:
            return cast(Tensor, self.head(self.features(images)))
        if images.is_floating_point():
            maps = images.float()
            seen = Inside(maps, (maps,), None)
        else:
            seen = cast(Backbone, self.backbone).inside(self._normalised(images))
        logits, representation = self.head.represented(seen.maps)  # type: ignore[operator]
        return Outputs(logits, representation, seen.stages, seen.pull)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - cast(Tensor, self.mean)) / cast(Tensor, self.std)


def build_head(config: Config, features: int, groups: Sequence[int]) -> nn.Module:
    """The head that the configuration names.

    Args:
        config: settings.
        features: channels of the maps that it reads.
        groups: how many classes each task so far has brought.
    """
    classes = sum(groups)
    if config.head == "ci_gcn":
        return CIGCN(features, classes, config.cigcn)
    if config.head == "label_graph":
        return LabelGraph(features, classes, config.agcn.width)
    if config.head == "attention":
        return IncrementalCrossAttention(features, groups, config.krt)
    return LinearHead(features, classes)


def with_prompts(config: Config, backbone: Backbone) -> Backbone | PromptedBackbone:
    """The backbone with the pool of prompts that the configuration may ask for."""
    return PromptedBackbone(backbone, config.l2p) if config.head == "prompts" else backbone
