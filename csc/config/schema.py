"""The settings of a run, group by group: defaults, which are the paper's, and the values that make sense.

`csc.config` says how the settings of a run come together.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from csc.errors import BadConfig

__all__ = ["BY_WHOM", "Backbone", "CiGcn", "Config", "Krt", "L2p", "Memory", "Train"]

BY_WHOM: dict[str, Any] = {"workers": "auto", "processes": "auto", "nodes": 1}  # changes no result


def setting(default: Any, *, least: float | None = None, most: float | None = None, positive: bool = False) -> Any:
    """A number with a default and limits; a word in its place has none."""
    return field(default=default, metadata={"least": least, "most": most, "positive": positive})


@dataclass(frozen=True)
class Backbone:
    """The feature extractor, by its timm name (`name` or `name.tag`)."""

    name: str = "tresnet_m.miil_in21k"
    frozen: bool = False
    output_stride: int = 32


@dataclass(frozen=True)
class Input:
    """What happens to an image on its way to the backbone."""

    size: int = setting(224, least=16)
    augment: bool = True
    decode: Literal["fast", "exact"] = "fast"


@dataclass(frozen=True)
class Features:
    """Cached feature maps of a frozen backbone: `views` per training image, augmented if the input is; 0 for none."""

    views: int = setting(0, least=0)


@dataclass(frozen=True)
class Train:
    """Optimisation of one task."""

    epochs: int = setting(20, least=1)
    batch_size: int = setting(64, least=2)
    lr_base: float = setting(4e-5, positive=True)
    lr: float = setting(4e-5, positive=True)
    backbone_lr_scale: float = setting(1.0, least=0)
    weight_decay: float = setting(1e-4, least=0)
    schedule: Literal["onecycle", "constant"] = "onecycle"
    pct_start: float = setting(0.2, least=0, most=1)
    clip: float = setting(0.0, least=0)
    accumulate: int = setting(1, least=1)
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool = False
    channels_last: Literal["auto", "on", "off"] = "auto"
    workers: int | Literal["auto"] = setting("auto", least=0)
    processes: int | Literal["auto"] = setting("auto", least=1)
    nodes: int = setting(1, least=1)


@dataclass(frozen=True)
class CiGcn:
    """The class-incremental graph network; every ablation of the paper's tables 4 and 5 is a value here."""

    width: int = setting(1024, least=1)
    correlation: Literal["G->S", "Z->S", "Z->Z"] = "G->S"
    masks: Literal["softmax", "sigmoid"] = "softmax"
    mask_axis: Literal["spatial", "class"] = "spatial"
    pooling: Literal["max", "avg"] = "max"
    fusion: Literal["mean", "sum"] = "mean"
    plain: bool = False
    rank: int = setting(0, least=0)


@dataclass(frozen=True)
class Loss:
    """The classification loss: weight of the new classes against distillation, and the form of the new-class term."""

    alpha: float = setting(0.15, least=0, most=1)
    form: Literal["bce", "asl"] = "bce"


@dataclass(frozen=True)
class MaxEntropy:
    """The max-entropy regulariser; `beta = 0` switches it off."""

    beta: float = setting(0.0, least=0)
    classes: Literal["old", "all"] = "old"
    form: Literal["one_sided", "binary"] = "one_sided"
    reduction: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True)
class Memory:
    """What is kept of a task's images for later tasks, and how it is replayed.

    `per_class` exemplars of each class, or `total` of all together (split evenly for `herding` and `random`).
    `concat` adds the exemplars to the task's images; `batch` draws a batch of them beside each batch of the task, and
    its loss counts `weight`. Unknown labels of an exemplar are negatives or masked.
    """

    sampler: Literal["none", "herding", "random", "reservoir", "prs", "ocdm"] = "none"
    per_class: int = setting(0, least=0)
    total: int = setting(0, least=0)
    unique: bool = False
    replay: Literal["concat", "batch"] = "concat"
    batch_size: int = setting(0, least=0)
    weight: float = setting(0.5, least=0)
    labels: Literal["own_task", "own_to_current"] = "own_to_current"
    unknown: Literal["negative", "masked"] = "negative"
    rho: float = 0.0


@dataclass(frozen=True)
class Oewc:
    """Online EWC: strength of the penalty, decay of the Fisher information, and how it is estimated."""

    weight: float = setting(100.0, least=0)
    gamma: float = setting(1.0, least=0, most=1)
    samples: int = setting(2000, least=1)
    batch_size: int = setting(4, least=1)


@dataclass(frozen=True)
class Podnet:
    """PODNet as adapted by KRT: weights of the pooled maps and of the final features."""

    spatial: float = setting(5.0, least=0)
    flat: float = setting(180.0, least=0)


@dataclass(frozen=True)
class Derpp:
    """DER++: weights of the stored logits and of the stored labels."""

    alpha: float = setting(0.5, least=0)
    beta: float = setting(0.5, least=0)


@dataclass(frozen=True)
class Agcn:
    """AGCN: weight of the preserved relations; for `head=label_graph` also the word vectors and the hidden width.

    `embeddings` names an .npz file with `classes` and `vectors`; `random` takes fixed random vectors.
    """

    relations: float = setting(0.01, least=0)
    embeddings: str = "random"
    width: int = setting(1024, least=1)


@dataclass(frozen=True)
class Krt:
    """KRT: the cross-attention head, the weight that keeps its old tokens' answers, and the pseudo-label threshold."""

    width: int = setting(384, least=1)
    heads: int = setting(8, least=1)
    init_std: float = setting(0.01, least=0)
    tokens: float = setting(100.0, least=0)
    threshold: float = setting(0.8, least=0, most=1)
    labels_per_image: float = setting(2.9, least=0)
    of_classes: int = setting(80, least=1)


@dataclass(frozen=True)
class L2p:
    """L2P: a pool of prompts for a frozen transformer, and the pull of the chosen keys towards the images."""

    pool: int = setting(10, least=1)
    length: int = setting(5, least=1)
    chosen: int = setting(5, least=1)
    pull: float = 0.1


@dataclass(frozen=True)
class ReleaseQuirks:
    """What the released code does otherwise than the paper, one switch each."""

    freeze_grown_layers: bool = False
    freeze_bn_after_base: bool = False
    persist_optimizer: bool = False
    no_shuffle: bool = False
    legacy_bias_reset: bool = False


@dataclass(frozen=True)
class Config:
    """Everything that decides the outcome of a run, apart from the data and the scenario."""

    method: str = "csc"
    seed: int = setting(0, least=0)
    init: str = "hub"
    allow_leaky_init: bool = False
    head: Literal["ci_gcn", "linear", "label_graph", "attention", "prompts"] = "linear"
    labels: Literal["task", "seen"] = "task"
    held_out: int = setting(0, least=0)  # one of so many training images is tested on, in the place of the test images
    old_label_policy: Literal["kd", "negative", "masked"] = "kd"
    threshold: float = setting(0.8, least=0, most=1)
    backbone: Backbone = field(default_factory=Backbone)
    input: Input = field(default_factory=Input)
    features: Features = field(default_factory=Features)
    train: Train = field(default_factory=Train)
    cigcn: CiGcn = field(default_factory=CiGcn)
    loss: Loss = field(default_factory=Loss)
    max_entropy: MaxEntropy = field(default_factory=MaxEntropy)
    memory: Memory = field(default_factory=Memory)
    oewc: Oewc = field(default_factory=Oewc)
    podnet: Podnet = field(default_factory=Podnet)
    derpp: Derpp = field(default_factory=Derpp)
    agcn: Agcn = field(default_factory=Agcn)
    krt: Krt = field(default_factory=Krt)
    l2p: L2p = field(default_factory=L2p)
    release_quirks: ReleaseQuirks = field(default_factory=ReleaseQuirks)

    def __post_init__(self) -> None:
        _check_ranges(self, "")
        _check_combinations(self)

    def to_json(self) -> str:
        """The whole configuration as canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def flat(self) -> dict[str, Any]:
        """Dotted keys and plain values, for tracking and tables."""
        return dict(_flatten(dataclasses.asdict(self)))

    def fingerprint(self, *more: str) -> str:
        """A short digest of the configuration and whatever else identifies a run; not of who does the work."""
        same = dataclasses.replace(self, train=dataclasses.replace(self.train, **BY_WHOM))
        return hashlib.sha256("\n".join([same.to_json(), *more]).encode()).hexdigest()[:16]


def _flatten(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs += _flatten(value, f"{path}{key}.") if isinstance(value, Mapping) else [(path + key, value)]
    return pairs


def _check_ranges(group: Any, path: str) -> None:
    """Refuse numbers outside their limits, by key."""
    for member in dataclasses.fields(group):
        value, limits = getattr(group, member.name), member.metadata
        if dataclasses.is_dataclass(value):
            _check_ranges(value, f"{path}{member.name}.")
        elif limits and not isinstance(value, str):
            _check_range(f"{path}{member.name}", value, **limits)


def _check_range(key: str, value: float, least: float | None, most: float | None, positive: bool) -> None:
    if most is not None and least is not None and not least <= value <= most:
        raise BadConfig(f"{key}={value}: expected a number between {least} and {most}")
    if least is not None and value < least:
        raise BadConfig(f"{key}={value}: expected {least} or more")
    if positive and not value > 0:
        raise BadConfig(f"{key}={value}: expected a positive number")


def _check_combinations(config: Config) -> None:
    """Refuse settings that contradict each other, or what no range can say."""
    if config.seed >= 1 << 53:
        raise BadConfig(f"seed={config.seed}: expected a number below {1 << 53}")
    if config.held_out == 1:
        raise BadConfig("held_out=1: holds out all training images; 5 holds out a fifth of them")
    if config.features.views and not config.backbone.frozen:
        raise BadConfig(
            f"features.views={config.features.views}: maps of a backbone that learns go stale; set backbone.frozen=true"
        )
    if config.features.views > 1 and not config.input.augment:
        raise BadConfig(
            f"features.views={config.features.views}: without input.augment all views are the same; set it to 1"
        )
    if config.cigcn.rank and config.cigcn.correlation != "G->S":
        raise BadConfig(f"cigcn.rank={config.cigcn.rank}: needs cigcn.correlation=G->S, a counted matrix has no rank")
    if config.krt.width % config.krt.heads:
        raise BadConfig(f"krt.width={config.krt.width}: expected a multiple of krt.heads={config.krt.heads}")
    if config.l2p.chosen > config.l2p.pool:
        raise BadConfig(f"l2p.chosen={config.l2p.chosen}: the pool has {config.l2p.pool} prompts")
    _check_memory(config.memory)
    if config.backbone.output_stride not in (8, 16, 32):
        raise BadConfig(f"backbone.output_stride={config.backbone.output_stride}: expected 8, 16 or 32")


def _check_memory(memory: Memory) -> None:
    """Refuse a memory without a size, or with one that its sampler cannot keep."""
    if memory.sampler == "none":
        return
    if bool(memory.per_class) == bool(memory.total):
        raise BadConfig(
            f"memory.per_class={memory.per_class}, memory.total={memory.total}: give one of them, and only one"
        )
    if memory.sampler in ("reservoir", "prs", "ocdm") and not memory.total:
        raise BadConfig(f"memory.sampler={memory.sampler}: keeps a fixed number of images, so set memory.total")
