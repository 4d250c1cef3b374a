"""DER++: dark experience replay (Buzzega et al., NeurIPS 2020), for many labels."""

from typing import TYPE_CHECKING, Literal

from csc.config.groups import NotNegative, Settings
from csc.config.schema import Config
from csc.methods import register
from csc.methods.base import LossInputs, Method
from csc.methods.er import RequiredMemorySettings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DERpp", "DerppSettings"]


class DerppSettings(Settings, frozen=True):
    """Weights of the stored logits and of the stored labels.

    Attributes:
        alpha: weight of the stored logits.
        beta: weight of the stored labels.
    """

    alpha: NotNegative = 0.5
    beta: NotNegative = 0.5


class DrawnMemorySettings(RequiredMemorySettings, frozen=True):
    """A memory whose exemplars are drawn with each batch."""

    replay: Literal["batch"] = "batch"


@register
class DERpp(Method):
    """L = L_cls(batch) + α ‖z(x₁) - z_stored‖² + β L_cls(x₂, y₂).

    x₁ and x₂ are two independent draws from the memory. z_stored are the logits of the model at the time the exemplar
    was stored, never refreshed; classes that came later have none and are left out. The distance is a mean over classes
    and, as L_cls, a mean over images or, with ASL, a sum.
    """

    name = "derpp"
    memory_settings = DrawnMemorySettings
    own_settings = (DerppSettings,)
    stores_logits = True
    replay_batches = 2

    @staticmethod
    def unread(config: Config) -> frozenset[str]:
        """Both draws have weights of their own."""
        return Method.unread(config) | {"memory.weight"}

    def replayed(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The stored logits of one draw, the labels of the other."""
        if not inputs.replays:
            return {}
        weights, (dark, labelled) = self.config.group(DerppSettings), inputs.replays
        squares = (dark.logits - dark.stored_logits).square() * dark.stored[: len(dark.logits)]
        distance = squares.sum() / dark.stored.sum().clamp(min=1) / inputs.share
        if self.config.loss.form == "asl":
            distance = distance * len(dark.stored)
        again = self.classify_replay(inputs, labelled)
        return {"logits": weights.alpha * distance, "replay": weights.beta * again}
