"""Reading what people write, in YAML, JSON or on the command line, into typed settings.

msgspec checks types and ranges. What it finds wrong becomes one line with the whole key, the value and what would be
right. Nothing is guessed: an unknown key, a key given twice or a value of another type is refused.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from csc.errors import BadConfig

__all__ = ["Settings", "convert", "load_yaml"]

_Kind = TypeVar("_Kind")
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LONGEST = 60  # characters of a wrong value that a message repeats


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings, each with its type, its range and its default."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which a key that is given twice is an error; the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"'{key}' is there twice", problem_mark=key_node.start_mark)
            seen.add(key if isinstance(key, str) else repr(key))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def load_yaml(path: Path) -> Any:
    """Read a YAML file; what cannot be read is one line that names the file and the line in it."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadConfig(f"{path}: not readable ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise BadConfig(f"{path}: not readable as YAML{line} ({getattr(error, 'problem', error)})") from None


def convert(kind: type[_Kind], content: Any, *, words: bool = False) -> _Kind:
    """Check plain data against a type of settings.

    Args:
        kind: a `Settings` type.
        content: as YAML or JSON gives it. A key without a value, as when all its lines are comments, counts as left out.
        words: take text for the number or the switch that it spells, as on the command line.
    """
    cleaned = _cleaned(kind, content, "", words)
    try:
        return msgspec.convert(cleaned, kind)
    except msgspec.ValidationError as error:
        raise BadConfig(_explained(str(error), kind, cleaned)) from None


def _spelled(text: str, hint: Any) -> Any:
    """The number or switch that a word spells where one is expected; otherwise the word itself."""
    kinds = {kind for kind in _alternatives(hint) if isinstance(kind, type)}
    if text in _choices(hint):
        return text
    if bool in kinds:
        return _SWITCHES.get(text.lower(), text)
    for kind in (int, float):
        if kinds & {kind, float}:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _cleaned(hint: Any, value: Any, key: str, words: bool) -> Any:
    """Look at what msgspec does not: unknown keys, whose neighbours are named, numbers that are none, and words."""
    hint = _bare(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields = {field.name: field.type for field in msgspec.structs.fields(hint)}
        if not isinstance(value, Mapping):
            raise BadConfig(f"{key or 'the file'}: expected a group of {', '.join(fields)}, found {_shown(value)}")
        path = f"{key}." if key else ""
        for name in value:
            if name not in fields:
                known = ", ".join(path + field for field in fields)
                raise BadConfig(f"{path}{name}: no such key; choose one of {known}")
        given = {name: item for name, item in value.items() if item is not None or words}
        return {name: _cleaned(fields[name], item, f"{path}{name}", words) for name, item in given.items()}
    if get_origin(hint) is tuple and isinstance(value, list):
        return [_cleaned(get_args(hint)[0], item, f"{key}[{index}]", words) for index, item in enumerate(value)]
    if words and isinstance(value, str):
        value = _spelled(value, hint)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadConfig(f"{key}={value}: expected {_expected(hint)}")
        if int in _alternatives(hint) and value == int(value):
            return int(value)
    return value


def _explained(message: str, kind: Any, content: Any) -> str:
    """Turn msgspec's words and path into the key, the value and what would be right."""
    place = re.search(r" - at `(?:key in )?\$(.*)`$", message)
    hint, value, path = kind, content, ""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place[1] if place else ""):
        hint = _bare(hint)
        if name:
            hint = {field.name: field.type for field in msgspec.structs.fields(hint)}[name]
            value, path = value[name], f"{path}.{name}" if path else name
        elif index == "...":  # a value of a mapping, which msgspec does not name
            hint = get_args(hint)[1]
            wrong = next((k for k, item in value.items() if not isinstance(item, hint)), "")
            value, path = value.get(wrong), f"{path}.{wrong}"
        else:
            hint, value, path = get_args(hint)[0], value[int(index)], f"{path}[{index}]"
    quote = f'; put it in quotes: "{value}"' if _bare(hint) is str and type(value) in (int, float) else ""
    return f"{path}={_shown(value)}: expected {_expected(hint)}{quote}"


def _expected(hint: Any) -> str:
    """What a value of a type is, in words, with its range."""
    limits = next((item for item in get_args(hint)[1:] if isinstance(item, msgspec.Meta)), None)
    bare = _bare(hint)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return f"a group of {', '.join(field.name for field in msgspec.structs.fields(bare))}"
    if get_origin(bare) is tuple:
        return "a list"
    if get_origin(bare) is dict:
        return "names with values"
    words = [_NAMES[kind] for kind in _alternatives(bare) if kind in _NAMES]
    choices = [str(choice) for choice in _choices(bare) if choice != ""]
    if choices:
        words.append(f"one of {', '.join(choices)}" if not words else " or ".join(repr(choice) for choice in choices))
    text = " or ".join(words)
    for part in _alternatives(hint) if limits is None else ():
        limits = limits or next((item for item in get_args(part)[1:] if isinstance(item, msgspec.Meta)), None)
    return text if limits is None else _within(text, limits)


def _within(text: str, limits: msgspec.Meta) -> str:
    if limits.ge is not None and limits.le is not None:
        return f"{text} between {limits.ge} and {limits.le}"
    if limits.ge is not None:
        return f"{text}, {limits.ge} or more"
    if limits.gt is not None:
        return text.replace("a number", "a positive number") if limits.gt == 0 else f"{text} above {limits.gt}"
    if limits.pattern is not None or limits.description:
        return limits.description or text
    return text


def _bare(hint: Any) -> Any:
    """A type without its limits."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    bare = _bare(hint)
    if get_origin(bare) in (Union, UnionType):
        return tuple(_bare(part) for part in get_args(bare))
    return (bare,)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The words or numbers that a value may be, if only some may."""
    return tuple(choice for part in _alternatives(hint) if get_origin(part) is Literal for choice in get_args(part))


def _shown(value: Any) -> str:
    text = "a list" if isinstance(value, list) else "a group" if isinstance(value, Mapping) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
