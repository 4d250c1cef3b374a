"""Learning methods, one file each, registered by name.

A method says what it needs (a prior model, a start from scratch) and turns one batch into loss terms; the loop in
`csc.training.loop` asks for it. Head, loss weights and all other numbers are settings: `methods/config/<name>.yaml`.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from csc.config import learns_like

if TYPE_CHECKING:
    from torch import Tensor

    from csc.config.schema import Config
    from csc.methods.base import Method

__all__ = ["kind_of", "method", "register", "registered"]

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


def kind_of(config: "Config") -> "type[Method]":
    """The class of the method that a configuration names; variants share the class of what they are like."""
    return registered()[learns_like(config.method)]


def method(config: "Config", state: "Mapping[str, Tensor] | None" = None) -> "Method":
    """The method that a configuration names, with what it kept of earlier tasks."""
    return kind_of(config)(config, state)
