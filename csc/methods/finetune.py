"""Fine-tuning: the lower bound."""

from typing import TYPE_CHECKING, Literal

from csc.config.groups import LossSettings
from csc.methods import register
from csc.methods.base import LossInputs, Method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FineTune", "FineTuneLoss"]


class FineTuneLoss(LossSettings, frozen=True):
    """What stands for the labels of old classes: zeros (`negative`), or nothing (`masked`, a milder variant).

    Attributes:
        old_labels: what stands for the labels of old classes.
    """

    old_labels: Literal["negative", "masked"] = "negative"


@register
class FineTune(Method):
    """L = L_cls over all n outputs, with zeros wherever labels are invisible, so old classes count as absent."""

    name = "finetune"
    loss_settings = FineTuneLoss
    memory_settings = None

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The classification loss of one batch."""
        first = inputs.old if self.config.group(FineTuneLoss).old_labels == "masked" else 0
        return {"ce": self.classify(inputs, inputs.logits[:, first:], inputs.targets[:, first:])}
