r"""CI-GCN: the class-incremental graph convolutional network (section 3.2 of the paper).

From a feature map F, class activation maps S and masks M = softmax(S) over space:

    V0 = Mᵀ T(F)                       label representations                       (eq. 3)
    V1 = V0 + σ(W_g σ(A_g V0))         general GCN, A_g learned for all images     (eq. 1, 4)
    A_s[j] = sigmoid(W [g ; V1_j])     specific correlation, g pooled from V1      (eq. 2)
    V2 = σ(W_s σ(A_s V1))              specific GCN                                (eq. 4)
    z  = (max S + w · (V0 + V2)) / 2   class and graph logits                      (eq. 5)

with σ = LeakyReLU(0.2). Transform T, residuals and inner activations are the released network's; `plain` takes them
out and leaves the equations as printed. A statistical matrix Z may stand in for A_g (and A_s): table 5.

A_g and A_s have n² entries for n classes. With `rank` = r > 0 both act on r hubs, learned mixtures H = Qᵀ V of the
nodes, instead of on the nodes: A_g = P Qᵀ and A_s are n × r, and time and memory grow linearly with n. r = n with
Q = I is the full form.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear, one_hot

from csc.nets.head import Head

if TYPE_CHECKING:
    from csc.methods.csc import CigcnSettings

__all__ = ["CIGCN"]

SLOPE = 0.2


class CIGCN(Head):
    """A head whose label graph grows with the classes.

    Every class-sized tensor has its classes on the leading axes, so growth is a copy into the top-left block.
    """

    def __init__(self, channels: int, classes: int, settings: "CigcnSettings") -> None:
        super().__init__()
        self.channels, self.classes, self.settings = channels, classes, settings
        nodes = channels if settings.plain else settings.width
        columns = settings.rank or classes
        self.class_maps = nn.Linear(channels, classes, bias=False)
        self.transform: nn.Identity | nn.Linear = nn.Identity() if settings.plain else nn.Linear(channels, nodes)
        if settings.correlation == "G->S":
            # 1 / √n in the full form. Nodes start alike, so a hub, which adds up n / r of them, needs √(n / r) less.
            bound = min(classes, columns) ** 0.5 / classes
            self.general_cm = nn.Parameter(torch.empty(classes, columns).uniform_(-bound, bound))
        else:
            self.register_buffer("statistical_cm", torch.eye(classes))
        if settings.rank:  # Q starts as the identity, wrapped around: class i is in hub i mod r
            self.hubs = nn.Parameter(one_hot(torch.arange(classes) % settings.rank, settings.rank).float())
        self.W_g = nn.Linear(nodes, settings.width, bias=not settings.plain)
        if settings.correlation != "Z->Z":
            self.pooled = nn.Linear(settings.width, settings.width)
            self.pooled_norm = nn.BatchNorm1d(settings.width)
            self.specific_cm = nn.Linear(2 * settings.width, columns)
        self.W_s = nn.Linear(settings.width, settings.width, bias=not settings.plain)
        self.output = nn.Linear(settings.width, classes)

    def resized(self, classes: int) -> "CIGCN":
        """See `Head`."""
        return CIGCN(self.channels, classes, self.settings)

    def logits_and_features(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the class nodes (B, n, D2) that the graph's part of them is read from."""
        F = maps.flatten(2).transpose(1, 2).contiguous()  # (B, P, channels), P = h·w; channels-last maps as is
        S = self.class_maps(F)  # (B, P, n)
        y_cls = S.amax(dim=1) if self.settings.pooling == "max" else S.mean(dim=1)
        V0 = self.label_nodes(self.masks(S), F)
        V1 = self.general_gcn(V0)
        V2 = self.specific_gcn(V1)
        nodes = V2 if self.settings.plain else V0 + V2
        y_gcn = (nodes * self.output.weight).sum(dim=2) + self.output.bias  # each class reads its own node
        total: Tensor = y_cls + y_gcn
        return total / 2 if self.settings.fusion == "mean" else total, nodes

    def masks(self, S: Tensor) -> Tensor:
        """Normalise the class activation maps (B, P, n) to masks of the same shape."""
        if self.settings.masks == "sigmoid":
            return S.sigmoid()
        return S.softmax(dim=1 if self.settings.mask_axis == "spatial" else 2)

    def masked(self, maps: Tensor, column: int) -> Tensor:
        """Maps (B, channels, h, w) under the mask of a class (B, channels): its V0 before T."""
        F = maps.flatten(2).transpose(1, 2)
        return (self.masks(self.class_maps(F))[:, :, column].unsqueeze(1) @ F).squeeze(1)

    def label_nodes(self, M: Tensor, F: Tensor) -> Tensor:
        """V0 (B, n, D): the transformed features under each mask.

        T is linear, so Mᵀ (F Wᵀ + 1 bᵀ) = (Mᵀ F) Wᵀ + (Mᵀ 1) bᵀ: it is applied to the positions or to the classes,
        whichever are fewer.
        """
        T, pool = self.transform, M.transpose(1, 2)  # (B, n, P)
        if isinstance(T, nn.Identity) or self.classes >= F.shape[1]:
            return pool @ cast(Tensor, T(F))
        return linear(pool @ F, T.weight) + pool.sum(dim=2, keepdim=True) @ T.bias.unsqueeze(0)

    def general_matrix(self) -> Tensor:
        """A_g, or the statistical matrix instead of it (n, n); P (n, r) of a low-rank A_g."""
        return self.general_cm if self.settings.correlation == "G->S" else cast(Tensor, self.statistical_cm)

    def correlation(self) -> tuple[str, Tensor]:
        """See `Head`; a low-rank form is multiplied out."""
        matrix = self.general_matrix()
        name = "A_g" if self.settings.correlation == "G->S" else "Z"
        return name, matrix @ self.hubs.T if self.settings.rank else matrix

    def gathered(self, A: Tensor, V: Tensor) -> Tensor:
        """A V: what each node gathers from the nodes V (B, n, D), or from the hubs if the graph has them.

        A is one matrix for all images (n, n or r), or one per image (B, n, n or r).
        """
        sources = _product(self.hubs.T, V) if self.settings.rank else V
        return _product(A, sources)

    def general_gcn(self, V0: Tensor) -> Tensor:
        """(B, n, D) → (B, n, D1): relations that hold for all images."""
        U = self.gathered(self.general_matrix(), V0)
        if self.settings.plain:
            return _activated(self.W_g(U))
        return V0 + _activated(self.W_g(_activated(U)))

    def specific_matrix(self, V1: Tensor) -> Tensor:
        """A_s (B, n, n or r): row j holds the weights with which node j gathers, from the image itself; or Z."""
        if self.settings.correlation == "Z->Z":
            return cast(Tensor, self.statistical_cm)
        g = _activated(self.pooled_norm(self.pooled(V1.mean(dim=1))))  # (B, D1)
        on_pooled, on_node = self.specific_cm.weight.chunk(2, dim=1)  # W [g ; v] = W' g + W'' v, g never copied n times
        bias = linear(g, on_pooled, self.specific_cm.bias)
        weights = linear(V1, on_node).add_(bias.unsqueeze(1)).sigmoid_()
        return weights / weights.shape[2] if self.settings.divide_specific else weights

    def specific_gcn(self, V1: Tensor) -> Tensor:
        """(B, n, D1) → (B, n, D2): relations of this image."""
        U = self.gathered(self.specific_matrix(V1), V1)
        return _activated(self.W_s(U if self.settings.plain else _activated(U)))


def _activated(x: Tensor) -> Tensor:
    """σ(x), written over x: whatever made x does not need it again, so backward keeps one tensor instead of two."""
    return leaky_relu(x, SLOPE, inplace=True)


def _product(A: Tensor, V: Tensor) -> Tensor:
    """A V for one matrix or one per image; expanded, as PyTorch would otherwise transpose and copy V."""
    return A.to(V.dtype).expand(len(V), -1, -1) @ V
