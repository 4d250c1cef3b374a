"""The plain head: global average pooling and one linear layer."""

from torch import Tensor, nn

__all__ = ["LinearHead"]


class LinearHead(nn.Module):
    """z = W · GAP(F) + b."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.features, self.classes = features, classes
        self.linear = nn.Linear(features, classes)

    def resized(self, classes: int) -> "LinearHead":
        """A head with the same settings and fresh weights for another number of classes."""
        return LinearHead(self.features, classes)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, features, h, w) → logits (B, classes)."""
        return self.represented(maps)[0]

    def represented(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the pooled features (B, features) that they are read from."""
        pooled = maps.mean(dim=(2, 3))
        return self.linear(pooled), pooled
