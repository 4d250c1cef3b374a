"""The feature extractor: any timm model by name, with weights whose origin is always recorded."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from csc.config.checks import weights_file
from csc.config.groups import BackboneSettings
from csc.errors import BadConfig, BadModel, HubUnavailable
from csc.storage import sha256_file
from csc.storage.tensors import load_tensors

__all__ = [
    "Backbone",
    "Initialisation",
    "Intermediates",
    "StoredBackbone",
    "build_backbone",
    "from_hub",
    "initialise",
    "leak",
    "normalisation",
]

COCO_CLASS_COUNT = 80
STAGES = 4  # whose outputs `Backbone.intermediates` gives
LEAKY_NAMES = ("ms_coco", "mscoco", "coco_tresnet", "tresnet_m_224_21k")


@dataclass(frozen=True)
class Initialisation:
    """Where the first weights of a run came from; stated with every result."""

    kind: str  # scratch, hub, file
    source: str
    sha256: str
    leaky: bool = False

    def __str__(self) -> str:
        digest = f", sha256 {self.sha256[:12]}" if self.sha256 else ""
        leak = ", COCO LABELS LEAKED" if self.leaky else ""
        return self.kind if self.kind == "scratch" else f"{self.kind} {self.source}{digest}{leak}"

    def to_plain(self) -> dict[str, Any]:
        """What the cards of models and of feature maps say of it."""
        return {**asdict(self), "text": str(self)}


class Intermediates(NamedTuple):
    """Feature maps, and what a backbone computes on the way to them."""

    maps: Tensor  # (B, channels, h, w), the last stage
    stages: tuple[Tensor, ...]  # (B, c, h, w) each, the maps being the last
    pull: Tensor | None  # (B,), of a pool of prompts


class Backbone(nn.Module):
    """A timm model that maps normalised images to its last feature map (B, channels, h, w)."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.channels = int(net.num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Feature maps; token sequences and channel-last maps are brought to the same layout."""
        return self._laid_out(self.net.forward_features(images))

    def intermediates(self, images: Tensor) -> Intermediates:
        """Feature maps and the outputs of the last stages; of a network whose stages timm does not name, the maps."""
        stages: list[Tensor] = []
        names = dict.fromkeys(info["module"] for info in getattr(self.net, "feature_info", [])[-STAGES:])
        hooks = [
            self.net.get_submodule(name).register_forward_hook(lambda _, __, output: stages.append(output))
            for name in names
        ]
        try:
            maps = self(images)
        finally:
            for hook in hooks:
                hook.remove()
        return Intermediates(maps, (*(self._laid_out(stage) for stage in stages[:-1]), maps), None)

    def _laid_out(self, maps: Tensor) -> Tensor:
        if maps.ndim == 3:  # (B, tokens, C): a transformer; class and register tokens have no position
            beyond_square = maps.shape[1] - math.isqrt(maps.shape[1]) ** 2  # for networks that do not say how many
            maps = maps[:, getattr(self.net, "num_prefix_tokens", beyond_square) :]
            side = round(maps.shape[1] ** 0.5)
            return maps.transpose(1, 2).reshape(len(maps), self.channels, side, maps.shape[1] // side)
        if maps.shape[1] != self.channels and maps.shape[-1] == self.channels:
            return maps.permute(0, 3, 1, 2)
        return maps


class StoredBackbone(nn.Module):
    """A backbone that does not run here: a network on it takes cached maps instead of images.

    `weights` are named as in `Backbone.state_dict`; a model that is saved keeps them.
    """

    def __init__(self, weights: dict[str, Tensor], channels: int) -> None:
        super().__init__()
        self.weights, self.channels = weights, channels

    def forward(self, maps: Tensor) -> Tensor:
        """Cached maps in full precision."""
        return maps.float()

    def intermediates(self, maps: Tensor) -> Intermediates:
        """Cached maps, which are all there is."""
        maps = self(maps)
        return Intermediates(maps, (maps,), None)

    def __deepcopy__(self, memo: dict[int, object]) -> "StoredBackbone":
        return StoredBackbone(self.weights, self.channels)  # weights that never change need no copy

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: value for name, value in self.weights.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
        self.weights = {
            name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
        }


def build_backbone(settings: BackboneSettings) -> Backbone:
    """Make a timm model without its classifier, with random weights."""
    import timm

    options = {} if settings.output_stride == 32 else {"output_stride": settings.output_stride}
    try:
        net = timm.create_model(settings.name, pretrained=False, num_classes=0, global_pool="", **options)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadConfig(
            f"backbone.name={settings.name}: timm cannot build it with {options or 'its defaults'} ({reason})"
        ) from None
    return Backbone(net)


def normalisation(backbone: Backbone) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the inputs that the weights expect."""
    expected = backbone.net.pretrained_cfg
    return tuple(expected["mean"]), tuple(expected["std"])


def initialise(settings: BackboneSettings, init: str, *, allow_leaky: bool) -> tuple[Backbone, Initialisation]:
    """Make the backbone of a base task.

    `init` is `scratch`, `hub` (timm's weights for the name) or the path of a safetensors file. With `allow_leaky`,
    weights that were fine-tuned on COCO labels are accepted, and marked in every result.
    """
    backbone = build_backbone(settings)
    if init == "scratch":
        return backbone, Initialisation("scratch", "random", "")
    path = weights_file(str(from_hub(settings.name)) if init == "hub" else init)
    leaky = _load_file(backbone, path, allow_leaky)
    kind, source = ("hub", settings.name) if init == "hub" else ("file", path.name)
    return backbone, Initialisation(kind, source, sha256_file(path), leaky)


def from_hub(name: str) -> Path:
    """Fetch timm's weights for a model as safetensors; timm itself would fall back to a pickled file."""
    import timm
    from huggingface_hub import hf_hub_download

    known = timm.get_pretrained_cfg(name)
    if known is None or not known.hf_hub_id:
        raise BadModel(
            f"init=hub: timm has no weights for {name}; set init=/path/to/weights.safetensors or init=scratch"
        )
    try:
        return Path(hf_hub_download(known.hf_hub_id, "model.safetensors"))
    except Exception as error:  # the hub client raises many kinds
        kind = HubUnavailable if _is_temporary(error) else BadModel
        raise kind(
            f"init=hub: the weights of {name} could not be fetched ({type(error).__name__}); "
            "on a machine without internet set init=/path/to/weights.safetensors"
        ) from None


def _is_temporary(error: Exception) -> bool:
    """Whether the hub could not be reached or had an error of its own, so that another try may help."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    unreached = isinstance(error, LocalEntryNotFoundError)
    cause = error.__cause__ if unreached else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return status in (408, 429) or status >= 500
    return unreached and cause is not None and not isinstance(cause, OfflineModeIsEnabled)


def _load_file(backbone: Backbone, path: Path, allow_leaky: bool) -> bool:
    """Copy weights from a safetensors file; return whether they have seen COCO labels."""
    weights = load_tensors(path)
    leaky = _is_leaky(path, weights)
    if leaky and not allow_leaky:
        raise leak(str(path))
    own = backbone.net.state_dict()
    missing = [name for name in own if name not in weights]
    wrong = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if missing or wrong:
        name = (missing or wrong)[0]
        raise BadModel(
            f"init={path}: not weights of this backbone; '{name}' is {'missing' if missing else 'of another shape'}"
        )
    backbone.net.load_state_dict({name: weights[name] for name in own})
    return leaky


def leak(init: str) -> BadModel:
    """The error for weights that have seen COCO labels, where that is not allowed."""
    return BadModel(
        f"init={init}: these weights were fine-tuned on the labels of MS-COCO, so results would leak; "
        "use ImageNet weights, or set allow_leaky_init=true to have every result marked"
    )


def _is_leaky(path: Path, weights: dict[str, Tensor]) -> bool:
    """Whether this is the COCO-tuned checkpoint that public code passes off as ImageNet-21k: by name or 80-way head."""
    heads = [w for name, w in weights.items() if name.startswith(("head.", "fc.", "classifier.", "last_linear."))]
    return any(word in path.name.lower() for word in LEAKY_NAMES) or any(
        w.shape[0] == COCO_CLASS_COUNT for w in heads if w.ndim
    )
