"""L3A: the closed form with random features, weights of images and pseudo-labels (ICML 2025)."""

from typing import TYPE_CHECKING, Literal

from csc.config.groups import AtLeast0, NotNegative, Unit
from csc.methods import register
from csc.methods.base import HEADS, HeadKind
from csc.methods.ridge import RidgeRegression, RidgeSettings

if TYPE_CHECKING:
    from torch import Tensor

    from csc.training.objective import Objective

__all__ = ["L3A", "L3aSettings"]


class L3aSettings(RidgeSettings, frozen=True):
    """The closed form as published, and its two ablations.

    Without weights and pseudo-labels it is plain ACIL.

    Attributes:
        weighting: of images: by the rarity of their classes (sqrt), or all alike (none).
        pseudo_labels: confidence from which an old class counts as present in a new image; 0 for no pseudo-labels.
    """

    penalty: NotNegative = 1000.0
    relative: bool = False
    bias: bool = False
    standardise: bool = False
    hidden: AtLeast0 = 4096
    weighting: Literal["sqrt", "none"] = "sqrt"
    pseudo_labels: Unit = 0.7


HEADS["l3a"] = HeadKind(HEADS["ridge"].build, L3aSettings)


@register
class L3A(RidgeRegression):
    """W = (A + γ I)⁻¹ C  with  A = Σ ω h hᵀ,  C = Σ ω h yᵀ  and  h = ReLU(W_r v), W_r random and fixed.

    Pseudo-labels: an old class is present in a new image where σ(z) > 0.7, z from the head of the task before.

    Weights: with N_c images of class c so far and K classes, w_c = K N_c^-½ / Σ_k N_k^-½, and ω of an image is the mean
    of w_c over its labels and pseudo-labels. Pseudo-labels are not counted in N; an image counts in each of its tasks.

    As published, the base task first trains the backbone for an epoch with ASL; `backbone.frozen=true` leaves that out,
    and allows cached maps. Scores become probabilities as in `ridge`, which leaves their order as it is.
    """

    name = "l3a"
    heads = ("l3a",)

    def solve(self, objective: "Objective") -> dict[str, float]:
        """Count the labels of the task, then add its images to the sums and solve."""
        self._count("counts", objective.labels())
        return super().solve(objective)

    def prior_solution(self) -> "Tensor | None":
        """The head of the task before, which gives the pseudo-labels."""
        return self._solution(self.state["A"], self.state["C"]) if "A" in self.state else None

    def weighted(
        self, h: "Tensor", labels: "Tensor", fresh: "Tensor", prior: "Tensor | None"
    ) -> "tuple[Tensor, Tensor]":
        """Labels with pseudo-labels of the old classes (B, n), and the weight of each image (B, 1).

        Also counts what it is shown, so it is called once for each image.
        An image that comes again and is counted once has its old labels from before, and needs no pseudo-labels.
        """
        import torch

        settings = self.config.group(L3aSettings)
        if prior is not None and settings.pseudo_labels:
            old = prior.shape[1]
            pseudo = ((h @ prior).sigmoid() > settings.pseudo_labels) & (fresh > 0).unsqueeze(1)
            labels = torch.cat([labels[:, :old].maximum(pseudo.to(labels.dtype)), labels[:, old:]], dim=1)
        self._count("present", labels)
        self.state["shown"] = self.state.get("shown", torch.zeros(())) + fresh.sum()
        if settings.weighting == "none":
            return super().weighted(h, labels, fresh, prior)
        counts = self.state["counts"]
        of_class = (counts > 0) / counts.clamp(min=1).sqrt()
        of_class = len(counts) * of_class / of_class.sum()
        return labels, (labels @ of_class / labels.sum(1).clamp(min=1)).unsqueeze(1)

    def class_frequencies(self, A: "Tensor", C: "Tensor") -> "Tensor":
        """See `ridge`; the sums are weighted here, shares are not."""
        return (self.state["present"] + 0.5) / (self.state["shown"] + 1)

    def _count(self, name: str, labels: "Tensor") -> None:
        """Add the labels of some images to the counts of a name, which may know fewer classes."""
        counts = labels.double().sum(0)
        before = self.state.get(name, counts[:0])
        counts[: len(before)] += before
        self.state[name] = counts
