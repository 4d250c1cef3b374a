"""ER: experience replay."""

from typing import TYPE_CHECKING, ClassVar, Literal

from csc.config.groups import MemorySettings
from csc.methods import register
from csc.methods.base import LossInputs, Method

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ER", "RequiredMemorySettings"]


class RequiredMemorySettings(MemorySettings, frozen=True):
    """Settings of a memory that cannot be switched off."""

    sampler: Literal["random", "herding", "reservoir", "prs", "ocdm"] = "random"


@register
class ER(Method):
    """L = L_cls over all n outputs on the task's images and exemplars of earlier ones, without distillation.

    Exemplars are added to the task's images (`memory.replay=concat`) or drawn as a batch of their own with each batch
    (`batch`). Unknown labels count as absent, or with `memory.unknown=masked` not at all.

    PRS and OCDM are this method with memories that keep a distribution of classes, replayed as a batch of weight 1.
    """

    name = "er"
    memory_settings: ClassVar[type[MemorySettings] | None] = RequiredMemorySettings

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The classification loss of one batch."""
        if self.config.memory.unknown == "negative":
            return {"ce": self.classify(inputs, inputs.logits, inputs.targets)}
        return {"ce": self.classify_known(inputs)}
