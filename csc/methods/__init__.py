"""Learning methods, one file each, registered by name.

A method's file holds its settings, the head that it brings, its equation and its loss; `methods/values/<name>.yaml` has
the values that differ from the defaults, for all data sets or for some. The loop in `csc.training` asks a method for
what it needs. None of the modules imports torch before one of its functions is called.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from csc.methods.base import HEADS, Method

if TYPE_CHECKING:
    from torch import Tensor

    from csc.config import Config
    from csc.nets.head import Head

__all__ = ["HEADS", "build_head", "build_method", "register", "registered"]

_REGISTRY: dict[str, type[Method]] = {}
Kind = TypeVar("Kind", bound=type[Method])


def register(kind: Kind) -> Kind:
    """Make a method known by its `name`."""
    if kind.name in _REGISTRY:
        raise ValueError(f"method '{kind.name}' is registered twice")
    _REGISTRY[kind.name] = kind
    return kind


@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name != "losses":  # which needs torch
            importlib.import_module(f"{__name__}.{module.name}")


def registered() -> dict[str, type[Method]]:
    """All methods by name."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


def build_method(config: "Config", state: "Mapping[str, Tensor] | None" = None) -> Method:
    """The method that a configuration names, with what it kept of earlier tasks."""
    from csc.config.layers import method_class

    return method_class(config.method)(config, state)


def build_head(config: "Config", channels: int, task_sizes: Sequence[int]) -> "Head":
    """The head that a configuration names, for maps with so many channels and tasks of so many classes."""
    _import_all()
    return HEADS[config.head].build(config, channels, task_sizes)
