"""What all methods share: the inputs of a loss, what they may ask of a task, and max-entropy, which any may add.

The tensors run over the whole batch, also when several processes train together. What a method measures inside
networks (`distances`) is reduced to one number per image first, in the process that has the image.

The modules of methods import torch inside their functions only: settings are read where there is no torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from csc.config.groups import LossSettings, MemorySettings, Settings
from csc.config.schema import Config
from csc.errors import BadConfig

if TYPE_CHECKING:
    from torch import Tensor

    from csc.nets.backbone import Backbone
    from csc.nets.head import Head
    from csc.nets.network import Network, Outputs
    from csc.nets.prompts import PromptedBackbone
    from csc.training.objective import Objective

__all__ = ["HEADS", "HeadKind", "LossInputs", "Method", "Replay"]


class HeadKind(NamedTuple):
    """A head that methods can build, and the type of the settings that it reads, if any."""

    build: "Callable[[Config, int, Sequence[int]], Head]"  # settings, channels of the maps, classes of each task
    settings: type[Settings] | None = None


def _linear(config: Config, channels: int, task_sizes: Sequence[int]) -> "Head":
    from csc.nets.head import LinearHead

    return LinearHead(channels, sum(task_sizes))


HEADS = {"linear": HeadKind(_linear)}  # by name; the modules of methods add theirs


@dataclass(frozen=True)
class Replay:
    """A batch of exemplars that was drawn with a batch of the task's own images."""

    logits: "Tensor"  # (B, n), of the learner
    targets: "Tensor"  # (B, n)
    known: "Tensor"  # (B or more, n): which targets are labels; the others are unknown, not absent
    stored_logits: "Tensor"  # (B, n): what the model said when the exemplar was stored
    stored: "Tensor"  # (B or more, n): which of them exist; classes that came later have none


@dataclass(frozen=True)
class LossInputs:
    """One batch as a method sees it; old classes come first on the class axis.

    Without `known`, the labels are those of the new classes (of all seen ones if the settings show them). With
    exemplars among the images, `known` says entry by entry what is a label.

    Batches may be accumulated to one update, of which this one is a `share`. A mask then has the rows of this batch
    first and those of all others after them: a mean over the entries that it marks is one over the whole update.
    """

    logits: "Tensor"  # (B, n)
    targets: "Tensor"  # (B, n), zero where unknown
    new: int  # how many of the n classes are new
    prior_logits: "Tensor | None" = None  # (B, n - new), from the prior model
    known: "Tensor | None" = None  # (B or more, n)
    distances: "Mapping[str, Tensor]" = field(default_factory=dict)  # (B,) each, from `Method.distances`
    replays: tuple[Replay, ...] = ()
    share: float = 1.0  # of the images of the update

    @property
    def old(self) -> int:
        """How many classes are old."""
        return self.logits.shape[1] - self.new


class Method:
    """A learning method: its settings, the heads it builds, the loss terms of one batch, and what it asks of the loop.

    What it keeps from one task to the next, apart from the network, is its `state`: tensors that travel with the model.
    """

    name: ClassVar[str]
    heads: ClassVar[tuple[str, ...]] = ("linear", "ci_gcn")  # that it can build, the usual one first
    loss_settings: ClassVar[type[LossSettings]] = LossSettings
    memory_settings: ClassVar[type[MemorySettings] | None] = MemorySettings  # none if it never replays
    own_settings: ClassVar[tuple[type[Settings], ...]] = ()  # groups that it reads, and its head may
    required_settings: ClassVar[tuple[str, ...]] = ()  # that it has to know of a data set
    takes_frozen_backbone: ClassVar[bool] = True
    needs_prior: ClassVar[bool] = False  # the frozen prior model gives its logits on each batch
    continues: ClassVar[bool] = True  # a task starts from the prior model; otherwise from the initialisation
    needs_intermediates: ClassVar[bool] = False  # `distances` wants more of the networks than logits
    stores_logits: ClassVar[bool] = False  # an exemplar is kept with what the finished model says of it
    solves: ClassVar[bool] = False  # `solve` gives the head its weights; updates are made only for the backbone
    replay_batches: ClassVar[int] = 1  # independent ones of exemplars at each update, with `memory.replay=batch`

    def __init__(self, config: Config, state: "Mapping[str, Tensor] | None" = None) -> None:
        self.config = config
        self.state: dict[str, Tensor] = dict(state or {})

    @classmethod
    def groups(cls, head: str) -> dict[str, type[Settings]]:
        """The groups of settings that a run adds to those of all runs; `KrtSettings` are the group `krt`."""
        memory = {"memory": cls.memory_settings} if cls.memory_settings is not None else {}
        kinds = [kind for kind in (HEADS[head].settings, *cls.own_settings) if kind is not None]
        own = {kind.__name__.removesuffix("Settings").lower(): kind for kind in kinds}
        return {"loss": cls.loss_settings, **memory, **own}

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse settings that the method cannot work with."""
        if config.backbone.frozen and not cls.takes_frozen_backbone:
            frozen = str(config.backbone.frozen).lower()
            raise BadConfig(
                f"backbone.frozen={frozen}: method '{config.method}' works by changing the backbone, so it cannot be "
                "frozen; leave backbone.frozen and features.views alone"
            )

    @staticmethod
    def unread(config: Config) -> "frozenset[str]":
        """Settings that a run never reads because of its others, as `memory.rho` without a memory."""
        memory, switches = config.memory, ("memory.sampler", "statistics.replay", "max_entropy.beta")
        read_if = {
            "memory.": memory.sampler != "none",
            "memory.rho": memory.sampler in ("prs", "ocdm"),
            "memory.weight": memory.replay == "batch",
            "memory.batch_size": memory.replay == "batch",
            "statistics.": config.statistics.replay,
            "max_entropy.": config.max_entropy.beta > 0,
            "train.pct_start": config.train.schedule == "onecycle",
            "train.backbone_lr_scale": config.backbone.learns(is_base=True),
        }
        unread = tuple(name for name, is_read in read_if.items() if not is_read)
        return frozenset(key for key in config.flat() if key.startswith(unread) and key not in switches)

    @classmethod
    def is_random(cls, config: Config) -> bool:
        """Whether the seed has a part in the outcome."""
        return True

    @classmethod
    def wrap(cls, config: Config, backbone: "Backbone") -> "Backbone | PromptedBackbone":
        """The backbone as the method uses it."""
        return backbone

    def begin(self, objective: "Objective") -> None:
        """Prepare for a task; called before its first update, and again by a try that resumes it."""

    def frozen_parameters(self, network: "Network") -> Iterable[str]:
        """Names of parameters that must not learn in a task after the first."""
        return ()

    def distances(self, learner: "Outputs", prior: "Outputs | None") -> "dict[str, Tensor]":
        """Per image (B,), what `terms` needs from inside the networks; only asked with `needs_intermediates`."""
        return {}

    def terms(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The weighted terms of the method's loss of the task's images, by name; the loss is the sum of all terms.

        Unless a method says otherwise, the classification loss alone.
        """
        return {"ce": self.classify(inputs, inputs.logits, inputs.targets)}

    def solve(self, objective: "Objective") -> dict[str, float]:
        """Give the network its weights after the task, in one pass; return what to log. Only asked with `solves`."""
        raise NotImplementedError

    def penalty(self, network: "Network") -> "dict[str, Tensor]":
        """Terms that depend on the weights alone."""
        return {}

    def finish(self, objective: "Objective") -> None:
        """Work out what later tasks need of this one, into `state`; called after the last update."""
        if self.config.statistics.replay:
            from csc.replay.statistics import with_statistics

            self.state = with_statistics(self.state, objective.features_of_new_classes())

    def loss(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """All terms: the method's own, those of exemplars drawn with the batch, and max-entropy if it is on."""
        return self.terms(inputs) | self.replayed(inputs) | self.max_entropy(inputs)

    @staticmethod
    def distance_terms(inputs: LossInputs, **weights: float) -> "dict[str, Tensor]":
        """The means of `distances` by their weights; none without a prior model."""
        return {name: weights[name] * values.mean() for name, values in inputs.distances.items()}

    def max_entropy(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """-β L_H: CSC's regulariser, which any method may add; there is none without old classes."""
        from csc.methods.losses import max_entropy

        regulariser = self.config.max_entropy
        if regulariser.beta == 0 or inputs.old == 0:
            return {}
        logits = inputs.logits[:, : inputs.old] if regulariser.classes == "old" else inputs.logits
        entropy = max_entropy(logits, regulariser.form, regulariser.reduction)
        beta = regulariser.beta * (inputs.old / inputs.new) ** regulariser.beta_power
        return {"H": -beta * self.scaled(entropy, len(logits), inputs)}

    def classify(
        self, inputs: LossInputs, logits: "Tensor", targets: "Tensor", known: "Tensor | None" = None
    ) -> "Tensor":
        """The classification loss in the form that the settings name, over the known entries.

        Accumulated batches weigh by their share of the update, so what is a part of a sum over the whole update is
        divided by it first.
        """
        from csc.methods.losses import asymmetric_loss, binary_cross_entropy

        if self.config.loss.form == "asl":
            return asymmetric_loss(logits, targets, known) / inputs.share
        mean = binary_cross_entropy(logits, targets, known)
        return mean if known is None else mean / inputs.share

    def classify_known(self, inputs: LossInputs) -> "Tensor":
        """The classification loss over all labels that there are: those of the new classes, and those of exemplars."""
        if inputs.known is not None:
            return self.classify(inputs, inputs.logits, inputs.targets, inputs.known)
        return self.classify(inputs, inputs.logits[:, inputs.old :], inputs.targets[:, inputs.old :])

    def classify_replay(self, inputs: LossInputs, replay: Replay) -> "Tensor":
        """The classification loss of exemplars drawn with the batch; unknown labels are masked, or count as absent."""
        known = replay.known if self.config.memory.unknown == "masked" else None
        return self.classify(inputs, replay.logits, replay.targets, known)

    def distil(
        self, inputs: LossInputs, logits: "Tensor", targets: "Tensor", known: "Tensor | None" = None
    ) -> "Tensor":
        """KD: the binary cross-entropy to soft targets, on the scale of `classify`: with ASL a sum over all entries."""
        from csc.methods.losses import binary_cross_entropy

        mean = binary_cross_entropy(logits, targets, known)
        if self.config.loss.form == "asl":
            return mean * (logits.numel() if known is None else known.sum()) / inputs.share
        return mean if known is None else mean / inputs.share

    def scaled(self, mean: "Tensor", images: int, inputs: LossInputs) -> "Tensor":
        """A mean over images on the scale of `classify`: with ASL a sum over them."""
        return mean * images / inputs.share if self.config.loss.form == "asl" else mean

    def replayed(self, inputs: LossInputs) -> "dict[str, Tensor]":
        """The terms of exemplars drawn with the batch, if any were."""
        if not inputs.replays:
            return {}
        return {"replay": self.config.memory.weight * self.classify_replay(inputs, inputs.replays[0])}
