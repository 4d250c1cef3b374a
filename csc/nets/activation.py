"""Where a network looks: one map per image and class, for people to look at.

    CI-GCN       its masks M over space                                  (eq. 3 of the paper)
    linear head  class activation maps W F
    label graph  the same with the classifiers that its graph makes
    KRT          attention of each task's tokens on the places, the same for the classes of a task
    prompts      attention rollout of the transformer, from its prompts to the patches, the same for all classes

Of any other head, the energy of the feature maps: where the backbone sees something at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from csc.nets.attention import IncrementalCrossAttention
from csc.nets.ci_gcn import CIGCN
from csc.nets.head import LinearHead
from csc.nets.label_graph import LabelGraph
from csc.nets.network import Network
from csc.nets.prompts import PromptedBackbone

__all__ = ["class_activation_maps"]


def class_activation_maps(network: Network, images: Tensor) -> Tensor:
    """What the network gets, uint8 images or cached maps, to maps (B, classes, h, w), each from 0 to 1."""
    if isinstance(network.backbone, PromptedBackbone):
        with _attention(network.backbone.net) as weights:
            classes = network(images).shape[1]
        found = rollout(network.backbone, weights).unsqueeze(1).expand(-1, classes, -1, -1)
    else:
        found = maps_of(network.head, network.features(images))
    low, high = (bound(found.float(), dim=(2, 3), keepdim=True) for bound in (torch.amin, torch.amax))
    return (found - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


@singledispatch
def maps_of(head: nn.Module, F: Tensor) -> Tensor:
    """Where a head looks in feature maps F (B, features, h, w): (B, n, h, w), larger where it looks more."""
    energy = F.float().square().mean(dim=1, keepdim=True)
    return energy.expand(-1, head(F).shape[1], -1, -1)


@maps_of.register
def _(head: CIGCN, F: Tensor) -> Tensor:
    places = F.flatten(2).transpose(1, 2)
    M = head.masks(head.class_maps(places))  # (B, P, n)
    return M.transpose(1, 2).unflatten(2, F.shape[2:])


@maps_of.register
def _(head: LinearHead, F: Tensor) -> Tensor:
    return torch.einsum("bchw,nc->bnhw", F, head.linear.weight)


@maps_of.register
def _(head: LabelGraph, F: Tensor) -> Tensor:
    _, H = head.represented(F)  # (B, n, features)
    return torch.einsum("bchw,bnc->bnhw", F, H)


@maps_of.register
def _(head: IncrementalCrossAttention, F: Tensor) -> Tensor:
    places = (head.projection(F) + head.positions(*F.shape[2:])).flatten(2).transpose(1, 2)
    of_tasks = head.block.attention(head.transfer, torch.cat([*head.tokens]), places)  # (B, T, P)
    tasks = torch.repeat_interleave(torch.arange(len(head.groups)), torch.tensor(head.groups))
    return of_tasks[:, tasks.to(F.device)].unflatten(2, F.shape[2:])


@contextmanager
def _attention(net: Any) -> Iterator[list[Tensor]]:
    """The attention of each block of a timm transformer in the passes of the context, (B, heads, tokens, tokens)."""
    layers = [block.attn for block in net.blocks]
    fused, weights = [layer.fused_attn for layer in layers], []
    hooks = [layer.attn_drop.register_forward_hook(lambda _, __, out: weights.append(out)) for layer in layers]
    try:
        for layer in layers:
            layer.fused_attn = False  # the fused form never makes the weights
        yield weights
    finally:
        for layer, was, hook in zip(layers, fused, hooks, strict=True):
            layer.fused_attn = was
            hook.remove()


def rollout(backbone: PromptedBackbone, weights: list[Tensor]) -> Tensor:
    """What reaches the prompts from each patch through all blocks (B, h, w), half of it by each block's residual."""
    depth, first = len(backbone.net.blocks), backbone.net.num_prefix_tokens
    reached: Tensor | None = None
    for layer in weights[-depth:]:  # the pass with prompts is the second
        A = layer.mean(dim=1) / 2 + torch.eye(layer.shape[-1], device=layer.device) / 2
        reached = A if reached is None else A @ reached
    assert reached is not None
    prompts = backbone.chosen * backbone.prompts.shape[1]
    seen = reached[:, first : first + prompts, first + prompts :].mean(dim=1)
    side = round(seen.shape[1] ** 0.5)
    return seen.unflatten(1, (side, seen.shape[1] // side))
