"""Where a network looks: one map per image and class, for people to look at.

    CI-GCN          its masks M over space                               (eq. 3 of the paper)
    KRT             attention of each task's tokens on the image, the same for the classes of a task
    prompts         attention rollout of the transformer, from its prompts to the patches, the same for all classes
    linear          attention rollout of a transformer, from the positions with a high score of a class to the patches
    any other       what the head says of each position alone; for a linear head, its class activation maps W F

They decide no number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, singledispatch
from typing import Any, cast

import torch
from torch import Tensor, nn

from csc.nets.attention import IncrementalCrossAttention
from csc.nets.backbone import Backbone
from csc.nets.ci_gcn import CIGCN
from csc.nets.head import LinearHead
from csc.nets.network import Network
from csc.nets.prompts import PromptedBackbone

__all__ = ["class_activation_maps"]


def class_activation_maps(network: Network, images: Tensor) -> Tensor:
    """Maps (B, classes, h, w), each from 0 to 1, of uint8 images or of cached maps, as the network takes them."""
    backbone, head = network.backbone, network.head
    if isinstance(backbone, PromptedBackbone):
        with _attention(backbone.net) as weights:
            classes = network(images).shape[1]
        maps = _from_prompts(backbone, weights).unsqueeze(1).expand(-1, classes, -1, -1)
    elif isinstance(head, LinearHead) and isinstance(backbone, Backbone) and _attends(backbone.net):
        with _attention(backbone.net) as weights:
            scores = maps_of(head, network.features(images))
        maps = _from_positions(scores, rollout(weights)[:, backbone.net.num_prefix_tokens :])
    else:
        maps = maps_of(head, network.features(images))
    low, high = (bound(maps.float(), dim=(2, 3), keepdim=True) for bound in (torch.amin, torch.amax))
    return (maps - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


@singledispatch
def maps_of(head: nn.Module, F: Tensor) -> Tensor:
    """Where a head looks in feature maps F (B, features, h, w): (B, n, h, w), larger where it looks more."""
    alone = F.permute(0, 2, 3, 1).flatten(0, 2)[:, :, None, None]  # (B · h · w, features, 1, 1)
    return cast(Tensor, head(alone)).view(len(F), *F.shape[2:], -1).permute(0, 3, 1, 2)


@maps_of.register
def _(head: CIGCN, F: Tensor) -> Tensor:
    M = head.masks(head.class_maps(F.flatten(2).transpose(1, 2)))  # (B, P, n)
    return M.transpose(1, 2).reshape(len(F), -1, *F.shape[2:])


@maps_of.register
def _(head: IncrementalCrossAttention, F: Tensor) -> Tensor:
    of_tasks = head.block.attention(head.transfer, torch.cat([*head.tokens]), head.image_tokens(F))  # (B, T, P)
    tasks = torch.repeat_interleave(torch.arange(len(head.task_sizes)), torch.tensor(head.task_sizes))
    return of_tasks[:, tasks.to(F.device)].view(len(F), -1, *F.shape[2:])


def _attends(net: Any) -> bool:
    """Whether a network is a timm transformer whose blocks give their attention between all tokens."""
    layers = [getattr(block, "attn", None) for block in getattr(net, "blocks", ())]
    readable = all(hasattr(layer, "fused_attn") and hasattr(layer, "attn_drop") for layer in layers)
    return bool(layers) and readable and hasattr(net, "num_prefix_tokens")


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


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """How much of each token after all blocks comes from each token before them (B, tokens, tokens).

    Half of what a block gives is its residual.
    """
    same = torch.eye(weights[0].shape[-1], device=weights[0].device)
    return reduce(lambda reached, layer: (layer.mean(dim=1) + same) / 2 @ reached, weights, same)


def _from_prompts(backbone: PromptedBackbone, weights: Sequence[Tensor]) -> Tensor:
    """What reaches the prompts from each patch (B, h, w)."""
    depth, first = len(backbone.net.blocks), backbone.net.num_prefix_tokens
    patches = first + backbone.chosen * backbone.prompts.shape[1]
    seen = rollout(weights[-depth:])[:, first:patches, patches:].mean(dim=1)  # the pass with prompts is the second
    return seen.view(len(seen), round(seen.shape[1] ** 0.5), -1)


def _from_positions(scores: Tensor, attention: Tensor) -> Tensor:
    """The rollout (B, P, P) of each class: the mean of its rows, weighted by the scores of positions (B, n, h, w)."""
    weights = scores.flatten(2).softmax(dim=2)  # (B, n, P), as the masks of CI-GCN
    return (weights @ attention[..., -weights.shape[2] :]).view_as(scores)
