"""What all methods share: the shape of a step, what they may ask of a task, and max-entropy, which any may add.

Tensors of a step run over the whole batch, also when several processes train together. What a method wants to measure
inside networks (`distances`) it reduces to one number per image first, where the image is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from csc.config.schema import Config
from csc.data.loading import Batch
from csc.methods.losses import asymmetric_loss, binary_cross_entropy, max_entropy
from csc.nets.network import Network, Outputs

__all__ = ["Lesson", "Method", "Replay", "Step"]


@dataclass(frozen=True)
class Replay:
    """A batch of exemplars that was drawn beside the task's own images."""

    logits: Tensor  # (B, n), of the learner
    targets: Tensor  # (B, n)
    known: Tensor  # (B, n): which targets are labels; the others are unknown, not absent
    stored_logits: Tensor  # (B, n): what the model said when the exemplar was stored
    stored: Tensor  # (B, n): which of them exist; classes that came later have none


@dataclass(frozen=True)
class Step:
    """One batch as a method sees it; old classes come first on the class axis.

    Without `known`, the labels are those of the new classes (of all seen ones if the settings show them). With
    exemplars among the images, `known` says entry by entry what is a label.
    """

    logits: Tensor  # (B, n)
    targets: Tensor  # (B, n), zero where unknown
    new: int  # how many of the n classes are new
    prior_logits: Tensor | None = None  # (B, n - new), from the model of the task before
    known: Tensor | None = None  # (B, n)
    distances: Mapping[str, Tensor] = field(default_factory=dict)  # (B,) each, from `Method.distances`
    replays: tuple[Replay, ...] = ()
    share: float = 1.0  # of the images of an update; less than all if batches are accumulated

    @property
    def old(self) -> int:
        """How many classes are old."""
        return self.logits.shape[1] - self.new


class Lesson(Protocol):
    """A task as a method may look at it before its first step and after its last."""

    network: Network  # already grown to all seen classes
    prior: Network | None
    new: int
    device: torch.device

    @property
    def classes(self) -> tuple[str, ...]:
        """All seen classes, old ones first."""

    def logits_of_prior(self) -> Tensor:
        """What the prior model says of every training image, exemplars included (images, old)."""

    def plain_batches(self, size: int, most: int) -> Iterator[Batch]:
        """Training images without augmentation, drawn at random, at most so many; on the device."""


class Method(ABC):
    """A learning method: loss terms of one step, and what it asks of the loop.

    What it keeps from one task to the next beside the network is its `state`: tensors that travel with the model.
    """

    name: ClassVar[str]
    needs_prior: ClassVar[bool] = False  # the frozen model of the task before gives its logits on each batch
    continues: ClassVar[bool] = True  # a task starts from the model before; otherwise from the initialisation
    looks_inside: ClassVar[bool] = False  # `distances` wants more of the networks than logits
    stores_logits: ClassVar[bool] = False  # an exemplar is kept with what the finished model says of it
    draws: ClassVar[int] = 1  # independent batches of exemplars at each step, with `memory.replay=batch`

    def __init__(self, config: Config, state: Mapping[str, Tensor] | None = None) -> None:
        self.config = config
        self.state: dict[str, Tensor] = dict(state or {})
        self._share = 1.0  # of the step at hand

    def begin(self, lesson: Lesson) -> None:  # noqa: B027  # most methods have nothing to prepare
        """Prepare for a task; called before its first step, and again by a try that takes it up."""

    def frozen(self, network: Network) -> Iterable[str]:
        """Names of parameters that must not learn in a task after the first."""
        return ()

    def distances(self, learner: Outputs, prior: Outputs | None) -> dict[str, Tensor]:
        """Per image (B,), what `terms` needs from inside the networks; only asked with `looks_inside`."""
        return {}

    @abstractmethod
    def terms(self, step: Step) -> dict[str, Tensor]:
        """The weighted terms of the method's own loss, by name; the loss is their sum."""

    def penalty(self, network: Network) -> dict[str, Tensor]:
        """Terms that depend on the weights alone."""
        return {}

    def finish(self, lesson: Lesson) -> None:  # noqa: B027
        """Work out what later tasks need of this one, into `state`; called after the last step."""

    def loss(self, step: Step) -> dict[str, Tensor]:
        """All terms: the method's own and, if switched on, max-entropy on the old classes (eq. 6 of the paper)."""
        self._share = step.share
        terms = self.terms(step)
        regulariser = self.config.max_entropy
        if regulariser.beta > 0 and step.old > 0:
            logits = step.logits[:, : step.old] if regulariser.classes == "old" else step.logits
            entropy = max_entropy(logits, regulariser.form, regulariser.reduction)
            terms["H"] = -regulariser.beta * self.as_classified(entropy, len(logits))
        return terms

    def classify(self, logits: Tensor, targets: Tensor, known: Tensor | None = None) -> Tensor:
        """The classification loss in the form that the settings name, over the known entries.

        Accumulated batches weigh by their share of the update, so what is a sum over images is divided by it first.
        """
        if self.config.loss.form == "asl":
            return asymmetric_loss(logits, targets, known) / self._share
        return binary_cross_entropy(logits, targets, known)

    def as_classified(self, mean: Tensor, images: int) -> Tensor:
        """A mean over images on the scale of `classify`: with ASL a sum over them."""
        return mean * images / self._share if self.config.loss.form == "asl" else mean

    def replayed(self, step: Step) -> dict[str, Tensor]:
        """The classification loss of the first batch of exemplars, if one was drawn."""
        if not step.replays:
            return {}
        replay = step.replays[0]
        known = replay.known if self.config.memory.unknown == "masked" else None
        return {"replay": self.config.memory.weight * self.classify(replay.logits, replay.targets, known)}
