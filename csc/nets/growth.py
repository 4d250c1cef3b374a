"""How a head grows when classes arrive: a larger head, with the old one in its leading block."""

from typing import TypeVar

import torch
from torch import nn

__all__ = ["grow", "grown_parameters"]

Head = TypeVar("Head", bound=nn.Module)


def grow(head: Head, classes: int, *, reset_biases: bool = False) -> Head:
    """Return a head for more classes that agrees with `head` on the old ones.

    New entries have the default initialisation of a layer of the new size; every tensor of the old head, biases
    included, is copied to the leading block of its counterpart.

    Args:
        head: a head with `resized`.
        classes: how many classes the result has.
        reset_biases: leave class-sized biases fresh, as the released code does.
    """
    larger: Head = head.resized(classes)  # type: ignore[operator]
    target = larger.state_dict()
    with torch.no_grad():
        for name, old in head.state_dict().items():
            if reset_biases and name.endswith("bias") and old.shape != target[name].shape:
                continue
            target[name][tuple(slice(size) for size in old.shape)] = old
    return larger


def grown_parameters(smaller: nn.Module, larger: nn.Module) -> list[str]:
    """Names of the parameters that came with the new classes, or whose shape depends on how many there are."""
    before = {name: value.shape for name, value in smaller.named_parameters()}
    return [name for name, value in larger.named_parameters() if before.get(name) != value.shape]
