"""Nested settings: laid over each other, by dotted keys, and as text."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flatten", "merged", "nested", "setting_text"]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Lay nested mappings over each other; later ones win.

    >>> merged({"train": {"lr": 1, "epochs": 2}}, {"train": {"lr": 3}})
    {'train': {'lr': 3, 'epochs': 2}}
    """
    tree: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = tree.get(key)
            if isinstance(value, Mapping):
                tree[key] = merged(below if isinstance(below, Mapping) else {}, value)
            else:
                tree[key] = value
    return tree


def flatten(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, by dotted keys.

    >>> list(flatten({"train": {"lr": 1, "epochs": 2}, "init": "hub"}))
    [('train.lr', 1), ('train.epochs', 2), ('init', 'hub')]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`.

    >>> nested({"train.lr": 1, "train.epochs": 2, "init": "hub"})
    {'train': {'lr': 1, 'epochs': 2}, 'init': 'hub'}
    """
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = merged(tree, value)
    return tree


def setting_text(value: Any, *, short: bool = False) -> str:
    """A setting as `--set` takes it; `short` is for reading, with six digits of a fraction.

    >>> setting_text(True), setting_text(1e-5), setting_text("hub"), setting_text(0.12345678)
    ('true', '1e-05', 'hub', '0.12345678')
    >>> setting_text(0.12345678, short=True), setting_text(0.0, short=True)
    ('0.123457', '0')
    """
    if short and isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
