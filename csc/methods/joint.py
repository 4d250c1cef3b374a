"""Joint training: the upper bound."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Method, Step

__all__ = ["Joint"]


@register
class Joint(Method):
    """L = L_cls over all n outputs, with all labels of all seen classes (`labels: seen`), from the initialisation.

    Each task is trained anew on everything seen, which gives the upper bound at every point of the curve.
    """

    name = "joint"
    continues = False

    def terms(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of one batch."""
        return {"ce": self.classify(step.logits, step.targets)}
