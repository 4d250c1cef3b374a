"""Every setting that there is, described by its type: default, range, who reads it, and what it means.

The meaning is the line of the setting in the docstring of its group, below `Attributes:`.
"""

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from csc.config.layers import method_class, methods, settings_type
from csc.config.reading import Settings, all_fields, expected

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
    for method in methods():
        for head in method_class(method).heads:
            for key, field, group in all_fields(settings_type(method, head)):
                if key not in found:
                    found[key] = Setting(key, field.default, expected(field.type), _meaning(group, field.name), ())
                if method not in found[key].readers:
                    found[key] = replace(found[key], readers=(*found[key].readers, method))
    return list(found.values())


def _meaning(group: type[Settings], name: str) -> str:
    """What the docstring of a group, or of the one that it extends, says of a setting; else what it says of itself."""
    texts = [inspect.cleandoc(base.__doc__ or "") for base in group.__mro__ if issubclass(base, Settings)]
    for text in texts:
        if line := re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", text, re.MULTILINE):
            return " ".join(line[1].split())
    return texts[0].partition("\n")[0]
