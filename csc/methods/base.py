"""What all methods share: the shape of a training step, and max-entropy, which any of them may add."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from csc.config import Config
from csc.methods.losses import asymmetric_loss, binary_cross_entropy, max_entropy

__all__ = ["Method", "Step"]


@dataclass(frozen=True)
class Step:
    """One batch as a method sees it; old classes come first on the class axis."""

    logits: Tensor  # (B, n)
    targets: Tensor  # (B, n); only the entries of new classes are labels, unless the view shows all seen ones
    new: int  # how many of the n classes are new
    prior_logits: Tensor | None = None  # (B, n - new), from the model of the task before

    @property
    def old(self) -> int:
        """How many classes are old."""
        return self.logits.shape[1] - self.new


class Method(ABC):
    """A learning method: loss terms of one step, and what it asks of the loop."""

    name: ClassVar[str]
    needs_prior: ClassVar[bool] = False  # the frozen model of the task before gives its logits on each batch
    continues: ClassVar[bool] = True  # a task starts from the model before; otherwise from the initialisation

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def terms(self, step: Step) -> dict[str, Tensor]:
        """The weighted terms of the method's own loss, by name; the loss is their sum."""

    def loss(self, step: Step) -> dict[str, Tensor]:
        """All terms: the method's own and, if switched on, max-entropy on the old classes (eq. 6 of the paper)."""
        terms = self.terms(step)
        regulariser = self.config.max_entropy
        if regulariser.beta > 0 and step.old > 0:
            logits = step.logits[:, : step.old] if regulariser.classes == "old" else step.logits
            terms["H"] = -regulariser.beta * max_entropy(logits, regulariser.form, regulariser.reduction)
        return terms

    def classify(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The classification loss in the form that the settings name."""
        return (asymmetric_loss if self.config.loss.form == "asl" else binary_cross_entropy)(logits, targets)
