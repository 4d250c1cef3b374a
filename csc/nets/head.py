"""What all heads share, the plain one, and how a head grows when classes arrive."""

from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Head", "LinearHead", "grow", "grown_parameters"]

AnyHead = TypeVar("AnyHead", bound="Head")


class Head(nn.Module):
    """Feature maps in, logits of the seen classes out."""

    def forward(self, maps: Tensor) -> Tensor:
        """(B, channels, h, w) → logits (B, classes)."""
        return self.logits_and_features(maps)[0]

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the features that they are computed from: of the image, or of each class."""
        raise NotImplementedError

    def correlation(self) -> tuple[str, Tensor] | None:
        """The name of the matrix that relates the classes, and the matrix (n, n); none if the head has no graph."""
        return None

    def resized(self: AnyHead, classes: int) -> AnyHead:
        """A head with the same settings and fresh weights for another number of classes."""
        raise NotImplementedError


class LinearHead(Head):
    """z = W · GAP(F) + b: global average pooling and one linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def resized(self, classes: int) -> "LinearHead":
        """See `Head`."""
        return LinearHead(self.linear.in_features, classes)

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the pooled features (B, channels)."""
        pooled = maps.mean(dim=(2, 3))
        return self.linear(pooled), pooled


def grow(head: AnyHead, classes: int, *, reset_biases: bool = False) -> AnyHead:
    """Return a head for more classes that agrees with `head` on the old ones.

    New entries have the default initialisation of a layer of the new size; every tensor of the old head, biases
    included, is copied to the leading block of its counterpart. With `reset_biases`, as in the released code,
    class-sized biases stay fresh.
    """
    larger = head.resized(classes)
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
