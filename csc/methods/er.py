"""ER: experience replay."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Method, Step

__all__ = ["ER"]


@register
class ER(Method):
    """L = L_cls over all n outputs on the task's images and exemplars of earlier ones, without distillation.

    Exemplars are added to the task's images (`memory.replay=concat`) or drawn as a batch of their own beside each
    batch (`batch`). Unknown labels count as absent, or with `memory.unknown=masked` not at all.

    PRS and OCDM are this method with memories that keep a distribution of classes, replayed as a batch of weight 1.
    """

    name = "er"

    def terms(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of one batch, and of exemplars drawn beside it."""
        if self.config.memory.unknown == "negative":
            return {"ce": self.classify(step.logits, step.targets), **self.replayed(step)}
        if step.known is not None:
            return {"ce": self.classify(step.logits, step.targets, step.known)}
        return {"ce": self.classify(step.logits[:, step.old :], step.targets[:, step.old :]), **self.replayed(step)}
