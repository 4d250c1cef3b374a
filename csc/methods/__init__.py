"""Learning methods, one file each, registered by name.

A method says what it needs (a prior model, a start from scratch) and turns one batch into loss terms; the loop in
`csc.training` asks for it. Head, loss weights and all other numbers are settings: `methods/config/<name>.yaml`.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from csc.config import Config
    from csc.methods.base import Method

__all__ = ["method", "register", "registered"]

_REGISTRY: "dict[str, type[Method]]" = {}
Kind = TypeVar("Kind", bound="type[Method]")


def register(kind: Kind) -> Kind:
    """Make a method known by its `name`."""
    if kind.name in _REGISTRY:
        raise ValueError(f"method '{kind.name}' is registered twice")
    _REGISTRY[kind.name] = kind
    return kind


def registered() -> "dict[str, type[Method]]":
    """All methods by name; imports their modules, and so torch."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def method(config: "Config") -> "Method":
    """The method that a configuration names."""
    return registered()[config.method](config)
