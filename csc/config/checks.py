"""What can be checked of a run's settings before it starts, in a moment and without torch.

A wrong name or a missing file would otherwise be noticed by the first step that builds the network.
"""

import difflib
import importlib.util
import os
import re
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from csc.config.schema import Config
from csc.errors import BadConfig, BadModel

__all__ = ["check_settings", "weights_file"]

HUB_SECONDS = 10.0  # to wait for an answer


def check_settings(config: Config) -> None:
    """Refuse a backbone that timm does not have, and an initialisation that this machine cannot read or fetch."""
    _check_backbone(config.backbone.name)
    if config.init == "hub":
        _check_hub(config.backbone.name)
    elif config.init != "scratch":
        weights_file(config.init)


def _check_backbone(name: str) -> None:
    known = _timm_models()
    model, _, tag = name.partition(".")
    if not known:
        return  # timm is not installed here: the steps run elsewhere
    if model not in known:
        close = difflib.get_close_matches(model, known, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise BadConfig(f"backbone.name={name}: timm has no such model{hint}")
    if tag and known[model] and tag not in known[model]:
        raise BadConfig(f"backbone.name={name}: timm has no weights '{tag}' for it, only {', '.join(known[model])}")


@cache
def _timm_models() -> dict[str, list[str]]:
    """The models of the installed timm, with their tags of weights as far as the sources spell them out.

    Read from the sources: importing timm takes seconds, and torch.
    """
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        return {}
    models: dict[str, list[str]] = {}
    tags: list[tuple[str, str]] = []
    for file in sorted(Path(found.origin).with_name("models").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        models |= {name: [] for name in re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE)}
        if "register_model_deprecations(" in text:
            models |= {name: [] for name in re.findall(r"^\s+['\"](\w+)['\"]:", text, re.MULTILINE)}
        tags += re.findall(r"['\"](\w+)\.(\w+)['\"]:", text)
    for name, tag in tags:
        if name in models:
            models[name].append(tag)
    return models


def weights_file(init: str) -> Path:
    """The file of first weights that `init` names; one that cannot be read is refused."""
    path = Path(init).expanduser()
    if path.suffix != ".safetensors":
        raise BadModel(
            f"init={init}: expected a .safetensors file (pickled weights are never loaded), 'hub' or 'scratch'"
        )
    if not path.is_file():
        raise BadModel(f"init={init}: no such file")
    if not os.access(path, os.R_OK):
        raise BadModel(f"init={init}: not readable (permission denied)")
    if importlib.util.find_spec("safetensors") is None:
        return path  # safetensors is not installed here: the steps run elsewhere
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return path
    except (OSError, SafetensorError) as error:
        raise BadModel(f"init={init}: not readable as safetensors ({error})") from None


def _check_hub(name: str) -> None:
    """Refuse weights that are not in the cache of this machine while their hub does not answer."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return  # nor is the client of the hub
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE).glob(f"models--*--{name}*/snapshots/*/model.safetensors")
    if any(cached):
        return
    remedy = "on a machine without internet set init=/path/to/weights.safetensors or init=scratch"
    if constants.HF_HUB_OFFLINE:
        raise BadConfig(f"init=hub: no weights of {name} in the cache, and HF_HUB_OFFLINE is set; {remedy}")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BadConfig(f"init=hub: {constants.ENDPOINT} does not answer ({reason}); {remedy}") from None
