"""The model contract: a folder that any step, node or program can load, without unpickling anything.

model.safetensors   all weights
model.json          the card: what the model is and how it came to be
training.json       what training looked like, epoch by epoch
method.safetensors  what the method keeps for later tasks, if anything (Fisher information, threshold, …)
memory.parquet      exemplars that the method replays, if it does: where their images are, labels, logits
optimizer.safetensors  only with `release_quirks.persist_optimizer`

The card has the digest of every other file, training.json aside, which is a log. They are compared whenever a
network is loaded.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from csc.config import resolve
from csc.config.schema import Config
from csc.errors import BadConfig, BadData, BadModel, BadScenario, explained
from csc.scenario import Scenario
from csc.storage import read_json, sha256_file
from csc.storage.tensors import load_tensors, save_tensors

if TYPE_CHECKING:
    from csc.nets.network import Network

__all__ = [
    "FORMAT",
    "MEMORY",
    "METHOD_STATE",
    "MOMENTS",
    "TRAINING_LOG",
    "ModelCard",
    "check_files",
    "fingerprint",
    "load_network",
    "read_card",
    "save_network",
]

FORMAT = 1
CHANNELS = 3  # of an image
CARD, WEIGHTS, METHOD_STATE, MEMORY = "model.json", "model.safetensors", "method.safetensors", "memory.parquet"
MOMENTS = "optimizer.safetensors"
TRAINING_LOG = "training.json"


@dataclass(frozen=True)
class ModelCard:
    """What must be known to use a model or to judge its results."""

    method: str
    scenario: str
    task: int
    tasks: int
    classes: tuple[str, ...]
    new: tuple[str, ...]
    config: dict[str, Any]
    initialisation: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_fingerprint: str
    prior_fingerprint: str
    code_version: str
    calibration: dict[str, Any] = field(default_factory=dict)  # of `csc.training.calibration`; none in older models
    format: int = FORMAT
    files: dict[str, str] = field(default_factory=dict, compare=False)  # SHA-256 of each; none in older models

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """How many classes each task so far has brought."""
        return Scenario.parse(self.scenario).sizes(len(self.classes))

    @property
    def old(self) -> int:
        """How many of its classes earlier tasks have brought."""
        return len(self.classes) - len(self.new)

    def resolved_config(self) -> Config:
        """The configuration that the model was trained with."""
        return resolve(Scenario.parse(self.scenario).dataset, self.config)

    @property
    def temperature(self) -> float:
        """Logits are divided by it before the sigmoid; 1 without calibration."""
        return float(self.calibration.get("temperature", 1.0))

    @property
    def thresholds(self) -> dict[str, float]:
        """Above which confidence each class counts as present; the setting for classes that have none of their own."""
        own, default = self.calibration.get("thresholds", {}), self.resolved_config().threshold
        return {name: float(own.get(name, default)) for name in self.classes}

    def artifact_metadata(self) -> dict[str, str | int]:
        """What the model is, in few words; a cluster stores them with every step that uses it."""
        return {
            "display_name": f"{self.scenario} {self.method}, task {self.task} of {self.tasks}",
            "seed": self.resolved_config().seed,
            "classes": len(self.classes),
        }


def save_network(network: "Network", card: ModelCard, folder: Path) -> None:
    """Write weights and card into an existing folder, last of all: the card has the digests of what is there."""
    save_tensors(network.state_dict(), folder / WEIGHTS)
    kept = sorted(path for path in folder.iterdir() if path.name not in (CARD, TRAINING_LOG))
    content = asdict(replace(card, files={path.name: sha256_file(path) for path in kept}))
    (folder / CARD).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def check_files(folder: Path, card: ModelCard) -> None:
    """Refuse a model whose files are not those that were saved with its card."""
    if not card.files:
        return
    found = {name for name in (WEIGHTS, METHOD_STATE, MEMORY, MOMENTS) if (folder / name).is_file()}
    for name in sorted(found.union(card.files)):
        path = folder / Path(name).name
        if not path.is_file() or sha256_file(path) != card.files.get(name):
            raise BadModel(f"{path}: not the file that was saved with this model; fetch the model or train it again")


def read_card(folder: Path) -> ModelCard:
    """Read the card of a model folder; needs no torch."""
    path = folder / CARD
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise BadModel(f"{path}: not a model of this project (expected an object)")
        if content.get("format") != FORMAT:
            raise BadModel(f"{path}: format {content.get('format')!r}, this version reads format {FORMAT}")
        if strange := content.keys() - {item.name for item in fields(ModelCard)}:
            raise BadModel(f"{path}: not a model of this project (unknown key '{min(strange)}')")
        card = msgspec.convert(content, ModelCard)
    except BadData as error:
        raise BadModel(f"{error}; not a model of this project") from None
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second: half a surrogate pair
        raise BadModel(f"{path}: not a model of this project ({explained(error)})") from None
    if problem := _contradiction(card):
        raise BadModel(f"{path}: {problem}")
    return card


def _contradiction(card: ModelCard) -> str:
    """In what a card of the right types contradicts itself; empty if in nothing."""
    try:
        sizes, config = card.task_sizes, card.resolved_config()
    except (BadConfig, BadScenario) as error:
        return str(error)
    if len(set(card.classes)) != len(card.classes) or len(sizes) != card.task:
        return f"task {card.task} of {card.scenario} cannot have these {len(card.classes)} classes"
    if not all(name and name.isprintable() for name in card.classes):
        return "a name of a class is not one line of plain text"
    if card.classes[-len(card.new) :] != card.new:
        return "the new classes are not the last ones"
    if config.method != card.method:
        return f"made by method {card.method}, with settings of {config.method}"
    if not _has_right_calibration(card):
        return "calibration is not a positive temperature and a threshold for each class"
    finite = all(map(math.isfinite, (*card.mean, *card.std)))
    if len(card.mean) != CHANNELS or len(card.std) != CHANNELS or min(card.std) <= 0 or not finite:
        return f"mean and std are not {CHANNELS} numbers each, those of std above 0"
    return ""


def _has_right_calibration(card: ModelCard) -> bool:
    try:
        return 0 < card.temperature < math.inf and min(card.thresholds.values()) >= 0
    except (TypeError, ValueError, AttributeError):
        return False


def load_network(folder: Path, *, map_channels: int = 0) -> tuple["Network", ModelCard]:
    """Rebuild the network of a model folder, in evaluation mode.

    With `map_channels` it gets cached maps of so many channels instead of images; its backbone is then kept as weights
    and never built.
    """
    from csc.config.layers import method_class
    from csc.methods import build_head
    from csc.nets.backbone import StoredBackbone, build_backbone
    from csc.nets.network import Network

    card = read_card(folder)
    check_files(folder, card)
    config = card.resolved_config()
    weights = load_tensors(folder / WEIGHTS)
    if not weights:
        raise BadModel(f"{folder / WEIGHTS}: no such file, or no weights in it")
    try:
        stored = StoredBackbone({}, map_channels) if map_channels else None
        backbone = stored or method_class(config.method).wrap(config, build_backbone(config.backbone))
        network = Network(backbone, build_head(config, backbone.channels, card.task_sizes), card.mean, card.std)
        network.load_state_dict(weights)
    except BadConfig as error:
        raise BadModel(f"{folder / CARD}: {error}") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise BadModel(f"{folder / WEIGHTS}: weights do not fit the card ({reason})") from None
    return network.eval(), card


def fingerprint(folder: Path) -> str:
    """SHA-256 of weights, card and what else later tasks build on: equal for equal models."""
    digest = hashlib.sha256()
    for name in (WEIGHTS, CARD, METHOD_STATE, MEMORY):
        path = folder / name
        if name in (WEIGHTS, CARD) or path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
