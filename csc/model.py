"""The model contract: a folder that any step, node or program can load, without unpickling anything.

model.safetensors   all weights
model.json          the card: what the model is and how it came to be
training.json       what training looked like, epoch by epoch
method.safetensors  what the method keeps for later tasks, if anything (Fisher information, threshold, …)
memory.parquet      exemplars that the method replays, if it does: where their images are, labels, logits
optimizer.safetensors  only with `release_quirks.persist_optimizer`
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.config import resolve
from csc.config.schema import Config
from csc.errors import BadConfig, BadModel
from csc.scenario import Scenario
from csc.storage import writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from csc.nets.network import Network

__all__ = [
    "FORMAT",
    "MEMORY",
    "METHOD_STATE",
    "ModelCard",
    "fingerprint",
    "load_network",
    "load_tensors",
    "read_card",
    "save_network",
    "save_tensors",
]

FORMAT = 1
METHOD_STATE, MEMORY = "method.safetensors", "memory.parquet"


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
    calibration: dict[str, Any] = field(
        default_factory=dict
    )  # `temperature` and `thresholds` by class; see `csc.training.calibration`
    format: int = FORMAT

    @property
    def groups(self) -> tuple[int, ...]:
        """How many classes each task so far has brought."""
        return Scenario.parse(self.scenario).sizes(len(self.classes))

    def settings(self) -> Config:
        """The configuration the model was trained with."""
        return resolve(Scenario.parse(self.scenario).dataset, self.config)

    @property
    def temperature(self) -> float:
        """By which logits are divided to give confidences that can be taken as frequencies."""
        return float(self.calibration.get("temperature", 1.0))

    @property
    def thresholds(self) -> dict[str, float]:
        """Above which confidence each class counts as present; the setting for classes that have none of their own."""
        own = self.calibration.get("thresholds", {})
        return {name: float(own.get(name, self.settings().threshold)) for name in self.classes}

    def facts(self) -> dict[str, str | int]:
        """What the model is, in few words; a cluster stores them with every step that uses it."""
        return {
            "display_name": f"{self.scenario} {self.method}, task {self.task} of {self.tasks}",
            "seed": int(self.config["seed"]),
            "classes": len(self.classes),
        }


def save_network(network: "Network", card: ModelCard, folder: Path) -> None:
    """Write weights and card into an existing folder."""
    save_tensors(network.state_dict(), folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(asdict(card), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, facts: dict[str, str] | None = None) -> None:
    """Write named tensors as safetensors; a full disk is reported in one line, as for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(stored, path, facts)
    except SafetensorError as error:
        if not (cause := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        with writable(path):
            raise OSError(int(cause[1]), os.strerror(int(cause[1]))) from None


def load_tensors(path: Path) -> "dict[str, Tensor]":
    """Read named tensors; none if there is no such file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        return {}
    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path}: not readable as safetensors ({error})") from None


def read_card(folder: Path) -> ModelCard:
    """Read what a model is; needs no torch."""
    path = folder / "model.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise BadModel(f"{path}: format {content.get('format')}, this version reads format {FORMAT}")
        lists = {key: tuple(content[key]) for key in ("classes", "new", "mean", "std")}
        return ModelCard(**(content | lists))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadModel(f"{path}: not a model of this project ({error})") from None


def load_network(folder: Path, *, map_channels: int = 0) -> tuple["Network", ModelCard]:
    """Rebuild the network of a model folder, in evaluation mode.

    Args:
        folder: of the model.
        map_channels: channels of the cached maps that the network gets instead of images; its backbone is then kept
            as weights and never built. 0 for a network that gets images.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from csc.methods import build_head, kind_of
    from csc.nets.backbone import StoredBackbone, build_backbone
    from csc.nets.network import Network

    card = read_card(folder)
    try:
        config = card.settings()
    except BadConfig as error:
        raise BadModel(f"{folder / 'model.json'}: {error}") from None
    try:
        weights = load_file(folder / "model.safetensors")
        stored = StoredBackbone({}, map_channels) if map_channels else None
        backbone = stored or kind_of(config).wrap(config, build_backbone(config.backbone))
        network = Network(backbone, build_head(config, backbone.channels, card.groups), card.mean, card.std)
        network.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadModel(f"{folder / 'model.safetensors'}: weights do not fit the card ({reason})") from None
    return network.eval(), card


def fingerprint(folder: Path) -> str:
    """SHA-256 of weights, card and what else later tasks build on: equal for equal models."""
    digest = hashlib.sha256()
    for name in ("model.safetensors", "model.json", METHOD_STATE, MEMORY):
        path = folder / name
        if name in ("model.safetensors", "model.json") or path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
