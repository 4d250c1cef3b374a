"""Nested settings: laid over each other, and by dotted keys."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["flatten", "merged", "nested"]


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
