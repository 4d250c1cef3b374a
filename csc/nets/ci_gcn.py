r"""CI-GCN: the class-incremental graph convolutional network (section 3.2 of the paper).

From a feature map F, class activation maps S and masks M = softmax(S) over space:

    V0 = Mᵀ T(F)                       label representations                       (eq. 3)
    V1 = V0 + σ(W_g σ(A_g V0))         general GCN, A_g learned for all images     (eq. 1, 4)
    A_s[j] = sigmoid(W [g ; V1_j])     specific correlation, g pooled from V1      (eq. 2)
    V2 = σ(W_s σ(A_s V1))              specific GCN                                (eq. 4)
    z  = (max S + w · (V0 + V2)) / 2   class and graph logits                      (eq. 5)

with σ = LeakyReLU(0.2). Transform T, residuals and inner activations are the released network's; `plain` takes them
out and leaves the equations as printed. A statistical matrix Z may stand in for A_g (and A_s): table 5.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from csc.config import CiGcn

__all__ = ["CIGCN"]

SLOPE = 0.2


class CIGCN(nn.Module):
    """A head whose label graph grows with the classes.

    Every class-sized tensor has its classes on the leading axes, so growth is a copy into the top-left block.
    """

    def __init__(self, features: int, classes: int, config: CiGcn) -> None:
        super().__init__()
        self.features, self.classes, self.config = features, classes, config
        nodes = features if config.plain else config.width
        self.class_maps = nn.Linear(features, classes, bias=False)
        self.transform = nn.Identity() if config.plain else nn.Linear(features, nodes)
        if config.correlation == "G->S":
            self.general_cm = nn.Parameter(torch.empty(classes, classes).uniform_(-1, 1) / classes**0.5)
        else:
            self.register_buffer("statistical_cm", torch.eye(classes))
        self.W_g = nn.Linear(nodes, config.width, bias=not config.plain)
        if config.correlation != "Z->Z":
            self.pooled = nn.Linear(config.width, config.width)
            self.pooled_norm = nn.BatchNorm1d(config.width)
            self.specific_cm = nn.Linear(2 * config.width, classes)
        self.W_s = nn.Linear(config.width, config.width, bias=not config.plain)
        self.output = nn.Linear(config.width, classes)

    def resized(self, classes: int) -> "CIGCN":
        """A head with the same settings and fresh weights for another number of classes."""
        return CIGCN(self.features, classes, self.config)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, features, h, w) → logits (B, n)."""
        F = maps.flatten(2).transpose(1, 2)  # (B, P, features), P = h·w places
        S = self.class_maps(F)  # (B, P, n)
        y_cls = S.amax(dim=1) if self.config.pooling == "max" else S.mean(dim=1)
        V0 = self.masks(S).transpose(1, 2) @ self.transform(F)  # (B, n, D)
        V1 = self.general_gcn(V0)
        V2 = self.specific_gcn(V1)
        nodes = V2 if self.config.plain else V0 + V2
        y_gcn = (nodes * self.output.weight).sum(dim=2) + self.output.bias  # each class reads its own node
        total: Tensor = y_cls + y_gcn
        return total / 2 if self.config.fusion == "mean" else total

    def masks(self, S: Tensor) -> Tensor:
        """Normalise the class activation maps (B, P, n) to masks of the same shape."""
        if self.config.masks == "sigmoid":
            return S.sigmoid()
        return S.softmax(dim=1 if self.config.mask_axis == "spatial" else 2)

    def general_matrix(self) -> Tensor:
        """A_g, or the statistical matrix in its place (n, n)."""
        return self.general_cm if self.config.correlation == "G->S" else cast(Tensor, self.statistical_cm)

    def general_gcn(self, V0: Tensor) -> Tensor:
        """(B, n, D) → (B, n, D1): relations that hold for all images."""
        U = self.general_matrix().to(V0.dtype) @ V0
        if self.config.plain:
            return leaky_relu(self.W_g(U), SLOPE)
        return V0 + leaky_relu(self.W_g(leaky_relu(U, SLOPE)), SLOPE)

    def specific_matrix(self, V1: Tensor) -> Tensor:
        """A_s (B, n, n): row j holds the weights with which node j gathers the others, from the image itself."""
        if self.config.correlation == "Z->Z":
            return cast(Tensor, self.statistical_cm).to(V1.dtype).expand(len(V1), -1, -1)
        g = leaky_relu(self.pooled_norm(self.pooled(V1.mean(dim=1))), SLOPE)  # (B, D1)
        on_pooled, on_node = self.specific_cm.weight.chunk(2, dim=1)  # W [g ; v] = W' g + W'' v, g never copied n times
        bias = nn.functional.linear(g, on_pooled, self.specific_cm.bias)
        return (nn.functional.linear(V1, on_node) + bias.unsqueeze(1)).sigmoid()

    def specific_gcn(self, V1: Tensor) -> Tensor:
        """(B, n, D1) → (B, n, D2): relations of this image."""
        Q = self.specific_matrix(V1) @ V1
        return leaky_relu(self.W_s(Q if self.config.plain else leaky_relu(Q, SLOPE)), SLOPE)
