"""The model contract: a folder that any step, node or program can load, without unpickling anything.

model.safetensors   all weights
model.json          the card: what the model is and how it came to be
training.json       what training looked like, epoch by epoch
optimizer.safetensors  only with `release_quirks.persist_optimizer`
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.config import Config, resolve
from csc.errors import BadModel
from csc.scenario import Scenario

if TYPE_CHECKING:
    from csc.nets.network import Network

__all__ = ["FORMAT", "ModelCard", "fingerprint", "load_network", "read_card", "save_network"]

FORMAT = 1


@dataclass(frozen=True)
class ModelCard:
    """Everything that must be known to use a model or to judge its results."""

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
    format: int = FORMAT

    def settings(self) -> Config:
        """The configuration the model was trained with."""
        return resolve(Scenario.parse(self.scenario).dataset, self.config)


def save_network(network: "Network", card: ModelCard, folder: Path) -> None:
    """Write weights and card into an existing folder."""
    from safetensors.torch import save_file

    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "model.json").write_text(json.dumps(asdict(card), indent=1, sort_keys=True) + "\n", encoding="utf-8")


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
        map_channels: of the cached maps that the network will see in the place of images; its backbone is then kept
            as weights and never built. 0 for a network that sees images.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from csc.nets.backbone import StoredBackbone, build_backbone
    from csc.nets.network import Network, build_head

    card = read_card(folder)
    config = card.settings()
    try:
        weights = load_file(folder / "model.safetensors")
        backbone = StoredBackbone({}, map_channels) if map_channels else build_backbone(config.backbone)
        network = Network(backbone, build_head(config, backbone.channels, len(card.classes)), card.mean, card.std)
        network.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadModel(f"{folder / 'model.safetensors'}: weights do not fit the card ({reason})") from None
    return network.eval(), card


def fingerprint(folder: Path) -> str:
    """SHA-256 of weights and card: equal for equal models."""
    digest = hashlib.sha256()
    for name in ("model.safetensors", "model.json"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
