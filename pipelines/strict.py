"""Strict reading of a YAML file into dataclasses: nothing is converted, guessed or ignored.

An unknown key, a key given twice or a value of another type is one line with the file and the dotted key. A key whose
lines are all commented out has no value, and counts as left out.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from csc.errors import BadConfig

__all__ = ["read_strict"]

_Kind = TypeVar("_Kind")
_EXPECTED: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def read_strict(kind: type[_Kind], path: Path) -> _Kind:
    """Read a file as a dataclass whose fields are dataclasses, tuples, dicts of text, literals and plain values."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _NoKeyTwice)  # a SafeLoader
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadConfig(f"{path}: not readable ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise BadConfig(f"{path}: not readable as YAML{line} ({getattr(error, 'problem', error)})") from None
    try:
        made: _Kind = _group(kind, {} if content is None else content, "")
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from None
    return made


class _NoKeyTwice(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error; the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"'{key}' is there twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def _group(kind: Any, value: Any, key: str) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(value, Mapping):
        raise BadConfig(f"{key or 'the file'}: expected a group of {', '.join(hints)}, found {_shown(value)}")
    path = f"{key}." if key else ""
    for name in value:
        if name not in hints:
            raise BadConfig(f"{path}{name}: no such key; choose one of {', '.join(path + known for known in hints)}")
    given = {name: item for name, item in value.items() if item is not None}
    return kind(**{name: _value(hints[name], item, f"{path}{name}") for name, item in given.items()})


def _value(hint: Any, value: Any, key: str) -> Any:
    """Read one value as its declared type; `key` is its whole path."""
    if dataclasses.is_dataclass(hint):
        return _group(hint, value, key)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise BadConfig(f"{key}: expected a list, found {_shown(value)}")
        return tuple(_value(get_args(hint)[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise BadConfig(f"{key}: expected names with values, found {_shown(value)}")
        return {_plain(str, name, key): _plain(str, item, f"{key}.{name}") for name, item in value.items()}
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise BadConfig(f"{key}: expected one of {', '.join(filter(None, get_args(hint)))}, found {_shown(value)}")
        return value
    return _plain(hint, value, key)


def _plain(hint: type, value: Any, key: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        quote = f'; put it in quotes: "{value}"' if hint is str and type(value) in (int, float) else ""
        raise BadConfig(f"{key}: expected {_EXPECTED[hint]}, found {_shown(value)}{quote}")
    return value


def _shown(value: Any) -> str:
    text = "a list" if isinstance(value, list) else "a group" if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
