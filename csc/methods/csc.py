"""CSC: Confidence Self-Calibration (Du et al., ECCV 2024)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from csc.config.groups import AtLeast0, AtLeast1, Settings
from csc.config.schema import Config
from csc.errors import BadConfig
from csc.methods import register
from csc.methods.base import HEADS, HeadKind, LossInputs
from csc.methods.lwf import LwF

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.head import Head

__all__ = ["CSC", "CigcnSettings"]


class CigcnSettings(Settings, frozen=True):
    """The class-incremental graph network; every ablation of the paper's table 5 is a value here.

    The other values are other readings of the paper; `rank` and `divide_specific` are ours.

    Attributes:
        width: features of a class in the graph.
        correlation: the two matrices: general (G), specific to the image (S), or counted (Z) as in AGCN.
        masks: what makes class activation maps of scores.
        mask_axis: whether a mask adds up to one over positions or over classes.
        pooling: what turns maps into scores of the classes.
        fusion: how the scores of maps and graph come together.
        plain: takes out what the released network adds to the equations.
        rank: of a low-rank form of the general matrix; 0 for the full one.
        divide_specific: divides A_s by the number of classes, so that what a node gathers does not grow with them.
    """

    width: AtLeast1 = 1024
    correlation: Literal["G->S", "Z->S", "Z->Z"] = "G->S"
    masks: Literal["softmax", "sigmoid"] = "softmax"
    mask_axis: Literal["spatial", "class"] = "spatial"
    pooling: Literal["max", "avg"] = "max"
    fusion: Literal["mean", "sum"] = "mean"
    plain: bool = False
    rank: AtLeast0 = 0
    divide_specific: bool = False

    def __post_init__(self) -> None:
        """Refuse a rank of a matrix that is counted, not learned."""
        if self.rank and self.correlation != "G->S":
            raise BadConfig(f"cigcn.rank={self.rank}: needs cigcn.correlation=G->S, a counted matrix has no rank")


def _ci_gcn(config: Config, channels: int, task_sizes: Sequence[int]) -> "Head":
    from csc.nets.ci_gcn import CIGCN

    return CIGCN(channels, sum(task_sizes), config.group(CigcnSettings))


HEADS["ci_gcn"] = HeadKind(_ci_gcn, CigcnSettings)


@register
class CSC(LwF):
    """L = α CE(C^t) + (1-α) KD(C^{1:t-1}) - β L_H(C^{1:t-1})   (eq. 5 to 7 of the paper).

    CE and KD are LwF's: new classes learn from labels, old ones from the prior model's soft outputs as pseudo-labels.
    What makes it CSC:

    - the CI-GCN head (eq. 1 to 4, `csc.nets.ci_gcn`), whose general correlation matrix A_g grows with the classes and
      learns from labels and pseudo-labels alike;
    - max-entropy (L_H, `csc.methods.losses`), which lowers the confidence that grows when labels are partial.

    Table 4 is `head` × `max_entropy.beta`.
    """

    name = "csc"
    heads = ("ci_gcn", "linear")

    def loss(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The terms of one batch; the base task has no old classes, and CE alone."""
        alpha, ce, kd = self.alpha(inputs), self.label_loss(inputs), self.prior_loss(inputs)
        terms = {"ce": ce} if kd is None else {"ce": alpha * ce, "kd": (1 - alpha) * kd}  # eq. 5
        terms |= self.replayed(inputs)  # CSC-R: exemplars that were drawn with the batch
        return terms | self.max_entropy(inputs)  # -β L_H, eq. 7
