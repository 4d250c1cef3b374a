"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020), for many labels."""

from torch import Tensor

from csc.methods import register
from csc.methods.base import Step
from csc.methods.er import ER

__all__ = ["DERpp"]


@register
class DERpp(ER):
    """L = L_cls(batch) + α ‖z(x₁) - z_stored‖² + β L_cls(x₂, y₂).

    x₁ and x₂ are two independent draws from the memory. z_stored are the logits of the model at the time the exemplar
    was stored, never refreshed; classes that came later have none and are left out. The distance is a mean over classes
    and, as L_cls, a mean over images or, with ASL, a sum.
    """

    name = "derpp"
    stores_logits = True
    draws = 2

    def terms(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of one batch, the stored logits of one draw, the labels of the other."""
        weights = self.config.derpp
        ce = self.classify(step.logits, step.targets)
        if not step.replays:
            return {"ce": ce}
        dark, labelled = step.replays
        distance = ((dark.logits - dark.stored_logits).square() * dark.stored).sum() / dark.stored.sum().clamp(min=1)
        distance = self.as_classified(distance, len(dark.logits))
        known = labelled.known if self.config.memory.unknown == "masked" else None
        again = self.classify(labelled.logits, labelled.targets, known)
        return {"ce": ce, "logits": weights.alpha * distance, "replay": weights.beta * again}
