"""How the settings of a run come together, the same in every step.

A configuration is resolved in layers: the defaults of `csc.config.schema` (the paper's), the preset of the data set
(`presets/<data set>.yaml`), the method's own settings (`methods/config/<method>.yaml`), then what the user sets.
What differs from the first three layers travels through the pipeline as one JSON string (`differences`), and every
step resolves it again.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from csc.config.schema import Config
from csc.errors import BadConfig

__all__ = ["differences", "learns_like", "methods", "parse_overrides", "resolve"]

_ROOT = Path(__file__).parents[1]
_FALLBACK_PRESET = "coco"  # any other data set is treated like the larger benchmark


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
    own, like = _own_and_like(method)
    preset = _preset(dataset)
    merged: dict[str, Any] = {}
    for layer in (*_layers(preset, own, like), wanted):
        _merge(merged, layer, "")
    merged["method"] = method
    _check_facts(method, own.get("facts", like.get("facts", [])), wanted, dataset if preset != dataset else "")
    config: Config = _build(Config, merged, "")
    _check_choices(config, {**like.get("choices", {}), **own.get("choices", {})})
    if config.backbone.frozen and (own.get("changes_backbone") or config.head == "prompts"):
        what = f"method '{method}'" if own.get("changes_backbone") else f"head={config.head}"
        raise BadConfig(
            f"backbone.frozen=true: {what} works by changing the backbone, so it cannot be frozen; "
            "leave backbone.frozen and features.views alone"
        )
    return config


def differences(dataset: str, config: Config) -> str:
    """The settings that differ from the method's own on a data set, as JSON that resolves to the same configuration.

    A pipeline hands it to every step, and a cluster keeps it many times over for each: all settings are 2 KB, these
    rarely more than 100 bytes.

    >>> differences("voc", resolve("voc", {"method": "lwf", "seed": 1}))
    '{"method": "lwf", "seed": 1}'
    """
    own, like = _own_and_like(config.method)
    plain: dict[str, Any] = {}
    for layer in _layers(_preset(dataset), own, like):
        _merge(plain, layer, "")
    default = _build(Config, plain, "").flat()
    always = {"method", "seed", *own.get("facts", like.get("facts", []))}
    tree: dict[str, Any] = {}
    for key, value in config.flat().items():
        if key in always or value != default[key]:
            group, _, name = key.rpartition(".")
            (tree.setdefault(group, {}) if group else tree)[name] = value
    return json.dumps(tree, sort_keys=True)


def _own_and_like(method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a method says of itself, and what the one says that it is a variant of, if any."""
    own = _method(method)
    return own, _method(own["like"]) if "like" in own else {}


def _preset(dataset: str) -> str:
    """The preset of a data set."""
    return dataset if (_ROOT / "config" / "presets" / f"{dataset}.yaml").is_file() else _FALLBACK_PRESET


def _layers(preset: str, own: Mapping[str, Any], like: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """What is set before the user sets anything, from the general to the particular."""
    return (
        _yaml(_ROOT / "config" / "presets" / f"{preset}.yaml"),
        like.get("settings", {}),
        like.get("datasets", {}).get(preset, {}),
        own.get("settings", {}),
        own.get("datasets", {}).get(preset, {}),
    )


def _check_facts(method: str, keys: Sequence[str], wanted: Mapping[str, Any], unknown: str) -> None:
    """Refuse to guess what a method has to know of a data set for which there is no preset."""
    for key in keys if unknown else ():
        group, _, name = key.partition(".")
        if name not in wanted.get(group, {}):
            raise BadConfig(
                f"{key}: method '{method}' has to know it of data set '{unknown}'; set {' and '.join(keys)}"
            )


def _check_choices(config: Config, choices: Mapping[str, Sequence[str]]) -> None:
    """Refuse values that mean nothing to the method, though they do to others."""
    given = config.flat()
    for key, values in choices.items():
        if given[key] not in values:
            raise BadConfig(f"{key}={given[key]}: method '{config.method}' takes only {', '.join(values)}")


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
