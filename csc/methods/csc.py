"""CSC: Confidence Self-Calibration (Du et al., ECCV 2024)."""

from csc.methods import register
from csc.methods.lwf import LwF

__all__ = ["CSC"]


@register
class CSC(LwF):
    """L = α CE(C^t) + (1-α) KD(C^{1:t-1}) - β H(C^{1:t-1})   (eq. 5 to 7 of the paper).

    The classification loss is LwF's; what makes it CSC is the CI-GCN head (`head: ci_gcn`, in `csc.nets.ci_gcn`),
    through which the correlation matrix learns from labels and pseudo-labels alike, and the max-entropy term, which
    every method may add (`max_entropy.beta`). Table 4 is `head` × `max_entropy.beta`.
    """

    name = "csc"
