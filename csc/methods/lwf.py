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
        settings, old = self.config.of(Distillation), step.old
        if settings.old_labels == "negative":
            return {"ce": self.classify(step, step.logits, step.targets)}
        ce = self.classify_known(step)
        if settings.old_labels == "masked" or step.prior_logits is None:
            return {"ce": ce}
        unknown = None if step.known is None else ~step.known[:, :old]
        kd = self.distil(step, step.logits[:, :old], step.prior_logits.sigmoid(), unknown)
        return {"ce": settings.alpha * ce, "kd": (1 - settings.alpha) * kd}
