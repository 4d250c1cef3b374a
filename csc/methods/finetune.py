"""Fine-tuning: the lower bound."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Method, Step

__all__ = ["FineTune"]


@register
class FineTune(Method):
    """L = L_cls over all n outputs, with zeros wherever labels are invisible, so old classes count as absent.

    `old_label_policy=masked` restricts the loss to the new classes, a milder variant.
    """

    name = "finetune"

    def terms(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of one batch."""
        first = step.old if self.config.old_label_policy == "masked" else 0
        return {"ce": self.classify(step.logits[:, first:], step.targets[:, first:])}
