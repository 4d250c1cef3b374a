"""LwF: Learning without Forgetting, the baseline that CSC builds on."""

from typing import TYPE_CHECKING, ClassVar, Literal

from csc.config.schema import Loss, Settings, Statistics, Unit
from csc.methods import register
from csc.methods.base import Method, Step

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Distillation", "LwF"]


class Distillation(Loss, frozen=True):
    """α, the weight of the labels against the prior model, and what stands for the labels of old classes.

    `kd` takes the prior model's soft outputs, `negative` zeros, `masked` nothing.

    Attributes:
        alpha: weight of the labels; the rest is that of the prior model.
        old_labels: what stands for the labels of old classes.
    """

    alpha: Unit = 0.15
    old_labels: Literal["kd", "negative", "masked"] = "kd"


@register
class LwF(Method):
    """L = α CE(new) + (1-α) KD(old): new classes from labels, old ones from the prior model.

    KD is the binary cross-entropy to σ(z of the prior): its soft outputs are the pseudo-labels. The base task is CE
    alone. Exemplars among the images have CE on all labels that they know, and KD on the other old classes.
    """

    name = "lwf"
    loss_settings = Distillation
    own_settings: ClassVar[tuple[type[Settings], ...]] = (Statistics,)
    needs_prior = True

    def terms(self, step: Step) -> "dict[str, Tensor]":
        """CE and KD of one batch."""
        alpha, ce, kd = self.config.of(Distillation).alpha, self.label_loss(step), self.prior_loss(step)
        return {"ce": ce} if kd is None else {"ce": alpha * ce, "kd": (1 - alpha) * kd}

    def label_loss(self, step: Step) -> "Tensor":
        """CE of the labels that there are; with `old_labels=negative` of all classes."""
        if self.config.of(Distillation).old_labels == "negative":
            return self.classify(step, step.logits, step.targets)
        return self.classify_known(step)

    def prior_loss(self, step: Step) -> "Tensor | None":
        """KD of the old classes whose labels are not known; none in the base task, or if the settings say so."""
        if self.config.of(Distillation).old_labels != "kd" or step.prior_logits is None:
            return None
        unknown = None if step.known is None else ~step.known[:, : step.old]
        return self.distil(step, step.logits[:, : step.old], step.prior_logits.sigmoid(), unknown)
