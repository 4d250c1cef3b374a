"""How the settings of a run come together, the same in every step.

Layers, from the general to the particular: the defaults of the types (the paper's), the preset of the data set
(`presets/<data set>.yaml`), the method's values (`methods/values/<method>.yaml`), then what the user sets. What differs
from the first three travels through the pipeline as one JSON string (`differences`), and every step resolves it again.

A run has only the settings that its method and head read. Others are refused, unless a preset sets them, which is
written for all methods.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from csc.config.reading import SWITCHES, Settings, all_fields, convert, load_yaml, note_old_name
from csc.config.schema import Config
from csc.config.tree import flatten, merged, nested
from csc.errors import BadConfig

if TYPE_CHECKING:
    from csc.methods.base import Method

__all__ = [
    "base_method",
    "differences",
    "method_class",
    "methods",
    "parse_overrides",
    "preset_for",
    "resolve",
    "settings_type",
]

_PRESETS = Path(__file__).parent / "presets"
_VALUES = Path(__file__).parents[1] / "methods" / "values"
_FALLBACK_PRESET = "coco"  # any other data set is treated like the larger benchmark
_OLD_LABELS, _FREEZE_BN = "old_label_policy", "release_quirks.freeze_bn_after_base"  # keys of the version before


def resolve(
    dataset: str, overrides: Mapping[str, Any] | str | None = None, shared: Mapping[str, Any] | None = None
) -> Config:
    """Layer defaults, preset, method and overrides into one validated configuration.

    Args:
        dataset: name of the data set, which picks the preset.
        overrides: nested mapping, or the same as JSON text; a setting that the run does not read is refused.
        shared: settings for several methods, as a study has them; those that the run does not read are left out.
    """
    chosen = _renamed(_from_json(overrides) if isinstance(overrides, str) else overrides or {})
    method = chosen.get("method", "csc")
    if not isinstance(method, str) or method not in methods():
        raise BadConfig(f"method '{method}' is not known; choose one of {', '.join(methods())}")
    values = merged(_values(dataset, method), _renamed(shared or {}))
    head = chosen.get("head", values["head"])
    if head not in method_class(method).heads:
        raise BadConfig(f"head={head}: method '{method}' takes only {', '.join(method_class(method).heads)}")
    config_type = settings_type(method, str(head))
    _check_read(chosen, config_type, method)
    _check_required(chosen, dataset, method)
    config = convert(config_type, merged(_readable(values, config_type), chosen), from_text=True)
    method_class(method).check(config)
    return config


def differences(dataset: str, config: Config) -> str:
    """The settings that differ from the method's own on a data set, as JSON that resolves to the same configuration.

    A pipeline passes it to every step, and a cluster stores it with each: all settings are 2 KB, these rarely more than
    100 bytes.

    >>> differences("voc", resolve("voc", {"method": "lwf", "seed": 1}))
    '{"method": "lwf", "seed": 1}'
    """
    values = _readable(_values(dataset, config.method), type(config))
    default = {**_defaults(type(config)), **dict(flatten(values))}
    always = ("method", "seed", *method_class(config.method).required_settings)
    changed = {key: value for key, value in config.flat().items() if key in always or value != default[key]}
    return json.dumps(nested(changed), sort_keys=True)


@cache
def methods() -> dict[str, str]:
    """The learning methods by name, with one line on each."""
    files = sorted(_VALUES.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: str(_yaml(file)["description"]) for file in files}


def base_method(method: str) -> str:
    """The method whose code a method runs: itself, or the one that it is a variant of."""
    return str(_yaml(_VALUES / f"{method}.yaml").get("like", method))


def method_class(method: str) -> "type[Method]":
    """The class of a method; a variant, which only differs in its values, has the class of what it is like."""
    from csc.methods import registered

    return registered()[base_method(method)]


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Turn `key=value` words of the command line into a nested mapping.

    >>> parse_overrides(["train.epochs=3", "method=lwf"])
    {'train': {'epochs': '3'}, 'method': 'lwf'}
    """
    tree: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not all(part.strip() for part in key.split(".")):
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
    except (ValueError, RecursionError) as error:
        raise BadConfig(f"config: not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadConfig('config: expected a JSON object such as {"method": "csc"}')
    return content


@cache
def _yaml(path: Path) -> dict[str, Any]:
    content = load_yaml(path)
    return content if isinstance(content, dict) else {}


def _values(dataset: str, method: str) -> dict[str, Any]:
    """The settings before the user's: the preset, then the method that this one is a variant of, then its own."""
    preset = preset_for(dataset)
    own = _yaml(_VALUES / f"{method}.yaml")
    like = _yaml(_VALUES / f"{own['like']}.yaml") if "like" in own else {}
    chosen = {"method": method, "head": method_class(method).heads[0]}
    return merged(chosen, _yaml(_PRESETS / f"{preset}.yaml"), *_layers(like, preset), *_layers(own, preset))


def preset_for(dataset: str) -> str:
    """The preset of a data set: its own, that of its family (`voc` for `voc2012`), else that of COCO.

    >>> [preset_for(name) for name in ("digits", "voc2012", "pets")]
    ['digits', 'voc', 'coco']
    """
    family = dataset.rstrip("0123456789")
    return next((name for name in (dataset, family) if _has_preset(name)), _FALLBACK_PRESET)


def _has_preset(dataset: str) -> bool:
    return (_PRESETS / f"{dataset}.yaml").is_file()


def _layers(values: Mapping[str, Any], preset: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return values.get("settings", {}), values.get("datasets", {}).get(preset, {})


@cache
def settings_type(method: str, head: str) -> type[Config]:
    """The type of the settings of a run: those of all, and those that its method and head read."""
    groups = method_class(method).groups(head)
    fields = [(name, group, msgspec.field(default_factory=group)) for name, group in groups.items()]
    reads = {"unread": method_class(method).unread}
    config_type = msgspec.defstruct("Config", fields, bases=(Config,), namespace=reads, frozen=True, kw_only=True)
    return cast("type[Config]", config_type)


@cache
def _defaults(settings_group: type[Settings]) -> Mapping[str, Any]:
    """The default of every setting of a type, by its dotted key."""
    return {key: field.default for key, field, _ in all_fields(settings_group)}


def _check_read(chosen: Mapping[str, Any], config_type: type[Config], method: str) -> None:
    """Refuse settings that exist, but that this method with this head does not read."""
    for key, _ in flatten(chosen):
        if key not in _defaults(config_type):
            types = {name: [settings_type(name, head) for head in method_class(name).heads] for name in methods()}
            readers = [name for name, heads in types.items() if any(key in _defaults(other) for other in heads)]
            if method in readers:
                raise BadConfig(f"{key}: read only with another head than the present one; set head too")
            if readers:
                raise BadConfig(f"{key}: method '{method}' does not read it, {', '.join(readers)} would")


def _check_required(chosen: Mapping[str, Any], dataset: str, method: str) -> None:
    """Refuse to guess what a method has to know of a data set for which there is no preset."""
    required = method_class(method).required_settings
    keys = dict(flatten(chosen))
    for key in required if not _has_preset(dataset) else ():
        if key not in keys:
            raise BadConfig(
                f"{key}: method '{method}' has to know it of data set '{dataset}'; set {' and '.join(required)}"
            )


def _readable(values: Mapping[str, Any], config_type: type[Config]) -> dict[str, Any]:
    """Those settings of presets and methods that a run reads; they are written for all methods and heads."""
    return nested({key: value for key, value in flatten(values) if key in _defaults(config_type)})


def _renamed(chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give keys of the version before their names of today, with a hint."""
    flat = dict(flatten(chosen))
    new: dict[str, Any] = {}
    if _OLD_LABELS in flat:
        new["loss.old_labels"] = flat.pop(_OLD_LABELS)
        note_old_name(_OLD_LABELS, "loss.old_labels")
    if _FREEZE_BN in flat:
        value = flat.pop(_FREEZE_BN)
        frozen = SWITCHES.get(str(value).lower())
        if frozen is None:
            raise BadConfig(f"{_FREEZE_BN}={value}: expected true or false")
        new["train.batch_norm"] = "frozen_after_base" if frozen else "live"
        if frozen:  # a model of the version before names all settings, also those that are off
            note_old_name(_FREEZE_BN, "train.batch_norm=frozen_after_base")
    return merged(nested(new), nested(flat)) if new else chosen
