"""The settings of a run: typed, frozen, validated, and the same in every step.

A configuration is resolved in layers: the defaults below (the paper's), the preset of the data set
(`presets/<data set>.yaml`), the method's own settings (`methods/config/<method>.yaml`), then what the user sets.
The result travels through the pipeline as one JSON string; resolving it again changes nothing.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from csc.errors import BadConfig

__all__ = ["BY_WHOM", "Config", "learns_like", "methods", "parse_overrides", "resolve"]

_ROOT = Path(__file__).parent
BY_WHOM: dict[str, Any] = {"workers": "auto", "processes": "auto", "nodes": 1}  # changes no result
_FALLBACK_PRESET = "coco"  # any other data set is treated like the larger benchmark


@dataclass(frozen=True)
class Backbone:
    """The feature extractor, by its timm name (`name` or `name.tag`)."""

    name: str = "tresnet_m.miil_in21k"
    frozen: bool = False
    output_stride: int = 32


@dataclass(frozen=True)
class Input:
    """What happens to an image on its way to the backbone."""

    size: int = 224
    augment: bool = True
    decode: Literal["fast", "exact"] = "fast"


@dataclass(frozen=True)
class Features:
    """Cached feature maps of a frozen backbone: `views` per training image, augmented if the input is; 0 for none."""

    views: int = 0


@dataclass(frozen=True)
class Train:
    """Optimisation of one task."""

    epochs: int = 20
    batch_size: int = 64
    lr_base: float = 4e-5
    lr: float = 4e-5
    backbone_lr_scale: float = 1.0
    weight_decay: float = 1e-4
    schedule: Literal["onecycle", "constant"] = "onecycle"
    pct_start: float = 0.2
    clip: float = 0.0
    accumulate: int = 1
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"
    compile: bool = False
    channels_last: Literal["auto", "on", "off"] = "auto"
    workers: int | Literal["auto"] = "auto"
    processes: int | Literal["auto"] = "auto"
    nodes: int = 1


@dataclass(frozen=True)
class CiGcn:
    """The class-incremental graph network; every ablation of the paper's tables 4 and 5 is a value here."""

    width: int = 1024
    correlation: Literal["G->S", "Z->S", "Z->Z"] = "G->S"
    masks: Literal["softmax", "sigmoid"] = "softmax"
    mask_axis: Literal["spatial", "class"] = "spatial"
    pooling: Literal["max", "avg"] = "max"
    fusion: Literal["mean", "sum"] = "mean"
    plain: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Loss:
    """The classification loss: weight of the new classes against distillation, and the form of the new-class term."""

    alpha: float = 0.15
    form: Literal["bce", "asl"] = "bce"


@dataclass(frozen=True)
class MaxEntropy:
    """The max-entropy regulariser; `beta = 0` switches it off."""

    beta: float = 0.0
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
    per_class: int = 0
    total: int = 0
    unique: bool = False
    replay: Literal["concat", "batch"] = "concat"
    batch_size: int = 0
    weight: float = 0.5
    labels: Literal["own_task", "own_to_current"] = "own_to_current"
    unknown: Literal["negative", "masked"] = "negative"
    rho: float = 0.0


@dataclass(frozen=True)
class Oewc:
    """Online EWC: strength of the penalty, decay of the Fisher information, and how it is estimated."""

    weight: float = 100.0
    gamma: float = 1.0
    samples: int = 2000
    batch_size: int = 4


@dataclass(frozen=True)
class Podnet:
    """PODNet as adapted by KRT: weights of the pooled maps and of the final features."""

    spatial: float = 5.0
    flat: float = 180.0


@dataclass(frozen=True)
class Derpp:
    """DER++: weights of the stored logits and of the stored labels."""

    alpha: float = 0.5
    beta: float = 0.5


@dataclass(frozen=True)
class Agcn:
    """AGCN: weight of the preserved relations; for `head=label_graph` also the word vectors and the hidden width.

    `embeddings` names an .npz file with `classes` and `vectors`; `random` takes fixed random vectors.
    """

    relations: float = 1.0
    embeddings: str = "random"
    width: int = 1024


@dataclass(frozen=True)
class Krt:
    """KRT: the cross-attention head, the weight that keeps its old tokens' answers, and the pseudo-label threshold."""

    width: int = 384
    heads: int = 8
    init_std: float = 0.01
    tokens: float = 100.0
    threshold: float = 0.8
    labels_per_image: float = 2.9
    of_classes: int = 80


@dataclass(frozen=True)
class L2p:
    """L2P: a pool of prompts for a frozen transformer, and the pull of the chosen keys towards the images."""

    pool: int = 10
    length: int = 5
    chosen: int = 5
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
    seed: int = 0
    init: str = "hub"
    allow_leaky_init: bool = False
    head: Literal["ci_gcn", "linear", "label_graph", "attention", "prompts"] = "linear"
    labels: Literal["task", "seen"] = "task"
    held_out: int = 0  # of so many training images one is tested on instead of the test images: for choosing settings
    old_label_policy: Literal["kd", "negative", "masked"] = "kd"
    threshold: float = 0.8
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
        _check_ranges(self)

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


def resolve(dataset: str, overrides: Mapping[str, Any] | str | None = None) -> Config:
    """Layer defaults, preset, method and overrides into one validated configuration.

    Args:
        dataset: name of the data set, which picks the preset.
        overrides: nested mapping, or the same as JSON text.
    """
    if isinstance(overrides, str):
        overrides = _from_json(overrides)
    wanted = dict(overrides or {})
    method = wanted.get("method", "csc")
    if not isinstance(method, str) or method not in methods():
        raise BadConfig(f"method '{method}' is not known; choose one of {', '.join(methods())}")
    own = _method(method)
    like = _method(own["like"]) if "like" in own else {}  # a variant: the settings of another method, and its own
    preset = dataset if (_ROOT / "presets" / f"{dataset}.yaml").is_file() else _FALLBACK_PRESET
    layers = (
        _yaml(_ROOT / "presets" / f"{preset}.yaml"),
        like.get("settings", {}),
        like.get("datasets", {}).get(preset, {}),
        own.get("settings", {}),
        own.get("datasets", {}).get(preset, {}),
        wanted,
    )
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer, "")
    merged["method"] = method
    config: Config = _build(Config, merged, "")
    if config.backbone.frozen and own.get("changes_backbone"):
        raise BadConfig(
            f"backbone.frozen=true: method '{method}' works by changing the backbone, so it cannot be frozen; "
            "leave backbone.frozen and features.views alone"
        )
    return config


def learns_like(method: str) -> str:
    """The method whose code a method runs: itself, or the one that it is a variant of."""
    return str(_method(method).get("like", method))


def _method(name: str) -> dict[str, Any]:
    return _yaml(_ROOT / "methods" / "config" / f"{name}.yaml")


@cache
def methods() -> dict[str, str]:
    """The learning methods by name, with one line on each; known without importing any of them."""
    files = sorted((_ROOT / "methods" / "config").glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: str(_yaml(file)["description"]) for file in files}


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Turn `key=value` words of the command line into a nested mapping.

    >>> parse_overrides(["train.epochs=3", "method=lwf"])
    {'train': {'epochs': '3'}, 'method': 'lwf'}
    """
    tree: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise BadConfig(f"--set {item}: expected key=value, for instance train.epochs=3")
        *parents, leaf = key.strip().split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise BadConfig(f"--set {item}: '{parent}' was already given a value, it cannot hold '{leaf}' too")
        node[leaf] = value.strip()
    return tree


def _from_json(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except ValueError as error:
        raise BadConfig(f"config: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadConfig('config: expected a JSON object such as {"method": "csc"}')
    return content


@cache
def _yaml(path: Path) -> dict[str, Any]:
    # The compiled loader is many times faster, and every step of a run reads all methods.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return content if isinstance(content, dict) else {}


def _merge(tree: dict[str, Any], layer: Mapping[str, Any], path: str) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping):
            node = tree.setdefault(key, {})
            if not isinstance(node, dict):
                raise BadConfig(f"{path}{key}: expected one value, got a group of settings")
            _merge(node, value, f"{path}{key}.")
        elif isinstance(tree.get(key), dict):
            raise BadConfig(f"{path}{key}: is a group of settings, set one of them: {path}{key}.<name>=…")
        else:
            tree[key] = value


def _flatten(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs += _flatten(value, f"{path}{key}.") if isinstance(value, Mapping) else [(path + key, value)]
    return pairs


def _build(kind: Any, values: Mapping[str, Any], path: str) -> Any:
    """Make a dataclass from plain values; an unknown key or a wrong type is named with its whole path."""
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise BadConfig(f"{path}{key}: no such setting; choose one of {', '.join(path + name for name in hints)}")
    built: dict[str, Any] = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                names = ", ".join(get_type_hints(hint))
                raise BadConfig(f"{path}{key}: is a group of settings, set one of them: {names}")
            built[key] = _build(hint, value, f"{path}{key}.")
        else:
            built[key] = _coerce(value, hint, f"{path}{key}")
    return kind(**built)


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """Read one value as its declared type; text from the command line counts as what it spells."""
    if get_origin(hint) is Union:  # a number or a word
        number, word = get_args(hint)
        try:
            return value if value in get_args(word) else _number(value, number, key)
        except BadConfig as error:
            raise BadConfig(f"{error} or '{get_args(word)[0]}'") from None
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise BadConfig(f"{key}={value}: expected one of {', '.join(get_args(hint))}")
    if hint is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if isinstance(value, bool) or str(value).lower() in words:
            return value if isinstance(value, bool) else words[str(value).lower()]
        raise BadConfig(f"{key}={value}: expected true or false")
    if hint is str:
        if isinstance(value, str) and value:
            return value
        raise BadConfig(f"{key}={value!r}: expected text")
    return _number(value, hint, key)


def _number(value: Any, kind: type, key: str) -> Any:
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float) and value != int(value)):
            raise ValueError
        number = kind(value)
        if not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise BadConfig(f"{key}={value}: expected {'a whole number' if kind is int else 'a number'}") from None
    return number


def _check_ranges(config: Config) -> None:
    """Refuse values that no run can use, by key."""
    at_least = {
        "input.size": 16,
        "train.epochs": 1,
        "train.batch_size": 2,
        "train.accumulate": 1,
        "train.workers": 0,
        "train.processes": 1,
        "train.nodes": 1,
        "train.weight_decay": 0,
        "train.backbone_lr_scale": 0,
        "cigcn.width": 1,
        "cigcn.rank": 0,
        "features.views": 0,
        "max_entropy.beta": 0,
        "memory.per_class": 0,
        "memory.total": 0,
        "memory.batch_size": 0,
        "memory.weight": 0,
        "train.clip": 0,
        "oewc.weight": 0,
        "oewc.samples": 1,
        "oewc.batch_size": 1,
        "podnet.spatial": 0,
        "podnet.flat": 0,
        "derpp.alpha": 0,
        "derpp.beta": 0,
        "agcn.relations": 0,
        "agcn.width": 1,
        "krt.width": 1,
        "krt.heads": 1,
        "krt.init_std": 0,
        "krt.tokens": 0,
        "krt.labels_per_image": 0,
        "krt.of_classes": 1,
        "l2p.pool": 1,
        "l2p.length": 1,
        "l2p.chosen": 1,
        "seed": 0,
        "held_out": 0,
    }
    between = {
        "loss.alpha": (0, 1),
        "threshold": (0, 1),
        "train.pct_start": (0, 1),
        "oewc.gamma": (0, 1),
        "krt.threshold": (0, 1),
    }
    values = config.flat()
    for key, low in at_least.items():
        if values[key] != "auto" and not values[key] >= low:
            raise BadConfig(f"{key}={values[key]}: expected {low} or more")
    for key, (low, high) in between.items():
        if not low <= values[key] <= high:
            raise BadConfig(f"{key}={values[key]}: expected a number between {low} and {high}")
    for key in ("train.lr", "train.lr_base"):
        if not values[key] > 0:
            raise BadConfig(f"{key}={values[key]}: expected a positive number")
    if config.seed >= 1 << 53:
        raise BadConfig(f"seed={config.seed}: expected a number below {1 << 53}")
    _check_combinations(config)


def _check_combinations(config: Config) -> None:
    """Refuse settings that contradict each other."""
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
