"""The groups of settings that all methods share: defaults, which are the paper's, and ranges."""

from typing import Annotated, Literal

from msgspec import Meta

from csc.config.reading import Settings
from csc.errors import BadConfig

__all__ = [
    "AtLeast0",
    "AtLeast1",
    "BackboneSettings",
    "FeaturesSettings",
    "InputSettings",
    "LossSettings",
    "MaxEntropySettings",
    "MemorySettings",
    "NotNegative",
    "RegisterSettings",
    "ReleaseQuirksSettings",
    "Settings",
    "StatisticsSettings",
    "Text",
    "TrainSettings",
    "Unit",
]

_HUGE = 1 << 31  # more would not fit into the numbers of a tensor
AtLeast0 = Annotated[int, Meta(ge=0, lt=_HUGE)]
AtLeast1 = Annotated[int, Meta(ge=1, lt=_HUGE)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
# Never an address: timm would fetch and build whatever is there.
TimmName = Annotated[
    str, Meta(pattern=r"^\w+(\.\w+)?\Z", description="a model of timm such as resnet18 or resnet18.a1_in1k")
]


class BackboneSettings(Settings, frozen=True):
    """The feature extractor, by its timm name (`name` or `name.tag`).

    Attributes:
        name: model of timm, with the tag of its weights.
        frozen: whether it keeps its weights, so that only the head learns: from the start, or after the base task.
        output_stride: pixels of the input per position of its last map.
    """

    name: TimmName = "tresnet_m.miil_in21k"
    frozen: bool | Literal["after_base"] = False
    output_stride: Literal[8, 16, 32] = 32

    def learns(self, *, is_base: bool) -> bool:
        """Whether it learns in a task."""
        return is_base if self.frozen == "after_base" else not self.frozen


class InputSettings(Settings, frozen=True):
    """What happens to an image on its way to the backbone.

    Attributes:
        size: side of the square that the network sees, in pixels.
        augment: whether training images get a random cutout and up to two random operations of RandAugment.
        decode: whether a JPEG may be decoded at a smaller scale, which is faster, or in full.
    """

    size: Annotated[int, Meta(ge=16, lt=_HUGE)] = 224
    augment: bool = True
    decode: Literal["fast", "exact"] = "fast"


class FeaturesSettings(Settings, frozen=True):
    """Cached feature maps of a frozen backbone: `views` per training image, augmented if the input is; 0 for none.

    Attributes:
        views: cached maps of each training image; 0 to learn from images.
    """

    views: AtLeast0 = 0


class TrainSettings(Settings, frozen=True):
    """Optimisation of one task.

    Attributes:
        epochs: passes over the images of a task.
        batch_size: images of a batch.
        lr_base: highest learning rate of the base task.
        lr: highest learning rate of later tasks.
        backbone_lr_scale: factor of the learning rate for the backbone.
        weight_decay: pull of the weights towards zero.
        batch_norm: statistics: live, kept after the base task, or in the backbone those of the first weights; auto is
            live from scratch, else frozen.
        schedule: how the learning rate changes within a task.
        pct_start: share of the steps in which it rises.
        clip: largest norm of the gradient; 0 for any.
        accumulate: batches whose gradients are added up for one update.
        amp: precision of the computation; auto takes what the device is fast at.
        compile: whether torch compiles the network.
        channels_last: layout of images and maps in memory.
        workers: processes that load images; auto for what the cores allow.
        processes: processes that train together on this machine; auto for one per GPU.
        nodes: machines of a cluster that train together.
    """

    epochs: AtLeast1 = 20
    batch_size: Annotated[int, Meta(ge=2, lt=_HUGE)] = 64
    lr_base: Positive = 4e-5
    lr: Positive = 4e-5
    backbone_lr_scale: NotNegative = 1.0
    weight_decay: NotNegative = 1e-4
    schedule: Literal["onecycle", "constant"] = "onecycle"
    pct_start: Unit = 0.2
    clip: NotNegative = 0.0
    accumulate: AtLeast1 = 1
    batch_norm: Literal["auto", "live", "frozen_after_base", "frozen"] = "auto"
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool = False
    channels_last: Literal["auto", "on", "off"] = "auto"
    workers: AtLeast0 | Literal["auto"] = "auto"
    processes: AtLeast1 | Literal["auto"] = "auto"
    nodes: AtLeast1 = 1


class LossSettings(Settings, frozen=True):
    """The classification loss; methods that weigh it against others add to this group.

    Attributes:
        form: binary cross-entropy, or the asymmetric loss.
    """

    form: Literal["bce", "asl"] = "bce"


class MaxEntropySettings(Settings, frozen=True):
    """The max-entropy regulariser, which any method may add; `beta = 0` switches it off.

    Attributes:
        beta: weight of the regulariser; 0 for none.
        beta_power: p of a schedule, where β is multiplied by (n_old / n_new)^p; ours.
        classes: whose confidences are kept from the extremes.
        form: entropy of the positive side only, or of both.
        reduction: whether classes are added up or averaged.
    """

    beta: NotNegative = 0.0
    beta_power: float = 0.0
    classes: Literal["old", "all"] = "old"
    form: Literal["one_sided", "binary"] = "one_sided"
    reduction: Literal["sum", "mean"] = "sum"


class MemorySettings(Settings, frozen=True):
    """What is kept of a task's images for later tasks, and how it is replayed.

    For `herding` and `random` a total is split evenly. `concat` adds the exemplars to the task's images, `batch` draws
    a batch of them with each batch of the task.

    Attributes:
        sampler: how exemplars are chosen; none keeps nothing.
        per_class: exemplars of each class.
        total: exemplars of all classes together.
        unique: whether an image that the memory has is not chosen again for another class.
        replay: whether exemplars join the images of the task or come in batches of their own.
        batch_size: exemplars of such a batch; 0 for as many as images.
        weight: of the loss of such a batch.
        labels: which labels of an exemplar count.
        unknown: whether other labels count as absent or not at all.
        relabel: who fills in unknown labels: nobody, the prior model (old classes), or the learner, too (new ones).
        rho: of prs: the share of a class in the memory is its frequency to this power.
    """

    sampler: Literal["none", "herding", "random", "reservoir", "prs", "ocdm"] = "none"
    per_class: AtLeast0 = 0
    total: AtLeast0 = 0
    unique: bool = False
    replay: Literal["concat", "batch"] = "concat"
    batch_size: AtLeast0 = 0
    weight: NotNegative = 0.5
    labels: Literal["own_task", "own_to_current"] = "own_to_current"
    unknown: Literal["negative", "masked"] = "negative"
    relabel: Literal["none", "teacher", "both"] = "none"
    rho: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a memory without a size, or with one that its sampler cannot keep."""
        if self.sampler == "none":
            return
        if bool(self.per_class) == bool(self.total):
            raise BadConfig(
                f"memory.per_class={self.per_class}, memory.total={self.total}: give one of them, and only one"
            )
        if self.sampler in ("reservoir", "prs", "ocdm") and not self.total:
            raise BadConfig(f"memory.sampler={self.sampler}: keeps a fixed number of images, so set memory.total")


class RegisterSettings(Settings, frozen=True):
    """What a model must reach to be named by an alias; one that fails is registered all the same.

    Attributes:
        min_map: least mAP of a model that gets an alias; 0 for any.
        max_drop: points of mAP that it may lose since the task before; 0 for any.
    """

    min_map: Annotated[float, Meta(ge=0, le=100)] = 0.0
    max_drop: NotNegative = 0.0


class StatisticsSettings(Settings, frozen=True):
    """Features of old classes, drawn from their mean and spread at each update (`csc.replay.statistics`); ours.

    As many are drawn as the batch has images. Only with a frozen backbone.

    Attributes:
        replay: whether features are drawn.
        weight: of their loss.
        pooling: of the maps: their mean, or under CI-GCN's mask of the class, which is V0 before its linear map.
    """

    replay: bool = False
    weight: NotNegative = 1.0
    pooling: Literal["mean", "masks"] = "mean"


class ReleaseQuirksSettings(Settings, frozen=True):
    """What the released code does otherwise than the paper, one switch each.

    Attributes:
        freeze_grown_layers: layers that grew with the classes do not learn in later tasks.
        persist_optimizer: the optimiser goes on with the moments of the task before.
        no_shuffle: images come in the same order in each epoch.
        legacy_bias_reset: layers that grow lose the biases that they had learned.
    """

    freeze_grown_layers: bool = False
    persist_optimizer: bool = False
    no_shuffle: bool = False
    legacy_bias_reset: bool = False
