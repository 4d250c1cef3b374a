"""LwF: Learning without Forgetting, the baseline that CSC builds on."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Method, Step
from csc.methods.losses import binary_cross_entropy

__all__ = ["LwF"]


@register
class LwF(Method):
    """L = α CE(new) + (1-α) KD(old): new classes from labels, old ones from the prior model.

    KD is the binary cross-entropy to σ(z of the prior): its soft outputs are the pseudo-labels. The base task is CE
    alone. `old_label_policy` swaps KD for no loss (`masked`) or for zeros as negatives (`negative`). Exemplars among
    the images have CE on all labels that they know, and KD on the other old classes.
    """

    name = "lwf"
    needs_prior = True

    def terms(self, step: Step) -> dict[str, Tensor]:
        """CE and KD of one batch, and the loss of exemplars drawn beside it."""
        policy, alpha, old = self.config.old_label_policy, self.config.loss.alpha, step.old
        if policy == "negative":
            return {"ce": self.classify(step.logits, step.targets), **self.replayed(step)}
        if step.known is not None:
            ce = self.classify(step.logits, step.targets, step.known)
        else:
            ce = self.classify(step.logits[:, old:], step.targets[:, old:])
        if policy == "masked" or step.prior_logits is None:
            return {"ce": ce, **self.replayed(step)}
        unknown = None if step.known is None else ~step.known[:, :old]
        kd = binary_cross_entropy(step.logits[:, :old], step.prior_logits.sigmoid(), unknown)
        return {"ce": alpha * ce, "kd": (1 - alpha) * kd, **self.replayed(step)}
