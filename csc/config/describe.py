"""Every setting that there is, described by its type: default, range, who reads it, and what it means.

The meaning is the line of the setting in the docstring of its group, below `Attributes:`.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from csc.config.layers import method_class, methods, settings_type
from csc.config.reading import Settings, expected

__all__ = ["Setting", "settings"]


@dataclass(frozen=True)
class Setting:
    """One key of `--set`; `values` says in words what it may be, `readers` which methods read it."""

    key: str
    default: Any
    values: str
    meaning: str
    readers: tuple[str, ...]


def settings() -> list[Setting]:
    """All settings of all methods and heads, in the order of their groups."""
    found: dict[str, Setting] = {}
    readers: dict[str, list[str]] = {}
    for method in methods():
        for head in method_class(method).heads:
            for setting in _of(settings_type(method, head)):
                found.setdefault(setting.key, setting)
                if method not in readers.setdefault(setting.key, []):
                    readers[setting.key].append(method)
    return [replace(one, readers=tuple(readers[key])) for key, one in found.items()]


def _of(kind: type[Settings], path: str = "") -> Iterator[Setting]:
    """The settings of a type and of the groups in it."""
    for item in msgspec.structs.fields(kind):
        if isinstance(item.type, type) and issubclass(item.type, Settings):
            yield from _of(item.type, f"{path}{item.name}.")
        else:
            yield Setting(path + item.name, item.default, expected(item.type), _meaning(kind, item.name), ())


def _meaning(kind: type[Settings], name: str) -> str:
    """What the docstring of a group, or of the one that it extends, says of a setting; else what it says of itself."""
    texts = [inspect.cleandoc(base.__doc__ or "") for base in kind.__mro__ if issubclass(base, Settings)]
    for text in texts:
        if line := re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE):
            return " ".join(line[1].split())
    return texts[0].partition("\n")[0]
