"""Joint training: the upper bound."""

from typing import TYPE_CHECKING

from csc.methods import register
from csc.methods.base import Method, Step

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Joint"]


@register
class Joint(Method):
    """L = L_cls over all n outputs, with all labels of all seen classes (`labels: seen`), from the initialisation.

    Each task is trained again on everything seen, which gives the upper bound at every point of the curve.
    """

    name = "joint"
    memory_settings = None
    continues = False

    def terms(self, step: Step) -> "dict[str, Tensor]":
        """The classification loss of one batch."""
        return {"ce": self.classify(step, step.logits, step.targets)}
