"""Reading what people write, in YAML, JSON or on the command line, into typed settings.

Types and limits are msgspec's. What is wrong becomes one line with the whole key, the value and what would be right.
Nothing is guessed: an unknown key, a key given twice or a value of another type is refused.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from csc.errors import BadConfig

__all__ = ["SWITCHES", "Settings", "all_fields", "convert", "expected", "load_yaml", "note_old_name"]

_Target = TypeVar("_Target")
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LONGEST = 60  # characters of a wrong value that a message repeats
_MOST = 100_000  # values in a file, with all that aliases repeat
_DEEPEST = 50  # groups within groups; the compiled reader of YAML crashes at many thousands


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of settings, each with its type, its limits and its default; a subclass says `frozen=True` again.

    `msgspec.Meta` has the limits: `ge`, `gt` and `le` of a number, or a `pattern` with a `description` that says in
    words what it stands for. With `extra={"hidden": True}` a wrong value is not repeated in messages.
    """


def all_fields(
    settings_type: type[Settings], path: str = ""
) -> Iterator[tuple[str, msgspec.structs.FieldInfo, type[Settings]]]:
    """The settings of a type and of the groups in it: the dotted key of each, its field, and the group that has it."""
    for item in msgspec.structs.fields(settings_type):
        if isinstance(item.type, type) and issubclass(item.type, Settings):
            yield from all_fields(item.type, f"{path}{item.name}.")
        else:
            yield path + item.name, item, settings_type


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
        text = path.read_text(encoding="utf-8")
        _check_size(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise BadConfig(f"{path}: not readable as YAML{line} ({problem})") from None
    except (OSError, ValueError) as error:
        raise BadConfig(f"{path}: not readable ({getattr(error, 'strerror', None) or error})") from None


@cache
def note_old_name(old: str, new: str) -> None:
    """Say that a name is an old one, once in a process; on stderr, where it spoils no answer of a command."""
    print(f"note: {old} is now called {new}; the next version will refuse the old name", file=sys.stderr, flush=True)


def _check_size(text: str) -> None:
    """Refuse what would take all memory: groups too deep within groups, in themselves, or in each other too often."""
    unfinished: list[tuple[str | None, int]] = []  # open groups: their anchors, and how many values came before them
    sizes: dict[str | None, int] = {}
    values = 0
    for event in yaml.parse(text, _Loader):
        problem = ""
        if isinstance(event, yaml.CollectionStartEvent):
            unfinished.append((event.anchor, values))
            problem = "too many groups within groups" if len(unfinished) > _DEEPEST else ""
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = unfinished.pop()
            sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            values += sizes.get(event.anchor, 1)
            problem = "a group holds itself" if event.anchor in [anchor for anchor, _ in unfinished] else ""
        values += 1
        if problem or values > _MOST:
            raise yaml.MarkedYAMLError(problem=problem or f"more than {_MOST:,} values", problem_mark=event.start_mark)


def convert(target_type: type[_Target], content: Any, *, from_text: bool = False) -> _Target:
    """Check plain data, as YAML or JSON gives it, against a type of settings.

    A key without a value, as when its lines are all comments, counts as left out. With `from_text`, as on the command
    line, text counts as the number or switch that it spells, and 3.0 as the number 3.
    """
    made: _Target = _value(target_type, content, "", from_text)
    return made


def _value(hint: Any, value: Any, key: str, from_text: bool) -> Any:
    """Check one value against its type; `key` is its whole path, for messages."""
    bare = _bare(hint)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return _group(bare, value, key, from_text)
    if get_origin(bare) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(bare)[0], item, f"{key}[{index}]", from_text) for index, item in enumerate(value))
    if get_origin(bare) is dict and isinstance(value, Mapping):
        name_hint, item_hint = get_args(bare)
        for name in value:
            if not _fits(name_hint, name):
                raise BadConfig(f"{key}.{_shown(name)}: expected {expected(name_hint)}")
        return {name: _value(item_hint, item, f"{key}.{name}", from_text) for name, item in value.items()}
    if from_text:
        value = _spelled(value, bare)
    if not _fits(hint, value):
        raise BadConfig(_problem(hint, value, key))
    return msgspec.convert(value, hint)


def _group(group_type: type[msgspec.Struct], value: Any, key: str, from_text: bool) -> Any:
    fields = {field.name: field.type for field in msgspec.structs.fields(group_type)}
    if not isinstance(value, Mapping):
        raise BadConfig(f"{key or 'the file'}: expected a group of {', '.join(fields)}")
    path = f"{key}." if key else ""
    for name in value:
        if name not in fields:
            known = ", ".join(path + field for field in fields)
            raise BadConfig(f"{path}{_shown(name)}: no such key; choose one of {known}")
    entries = {name: item for name, item in value.items() if item is not None or from_text}
    return group_type(
        **{name: _value(fields[name], item, f"{path}{name}", from_text) for name, item in entries.items()}
    )


def _spelled(value: Any, hint: Any) -> Any:
    """The number or switch that a word spells where one is expected; otherwise the word itself."""
    kinds = {*_alternatives(hint), *map(type, _choices(hint))}
    if isinstance(value, float) and int in kinds and value.is_integer():
        return int(value)
    if not isinstance(value, str) or value in _choices(hint):
        return value
    if bool in kinds:
        return SWITCHES.get(value.lower(), value)
    for kind in (int, float):
        if kind in kinds or float in kinds:
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of a plain type and within its limits; NaN and infinity never are."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        msgspec.convert(value, hint)
    except ValueError:
        return False
    return True


def _problem(hint: Any, value: Any, key: str) -> str:
    limits = _limits(hint)
    hidden = bool(limits and limits.extra and limits.extra.get("hidden"))
    given = key if hidden else f"{key}={_shown(value)}"
    quotes = ""
    if _bare(hint) is str and type(value) in (int, float):
        quotes = "; put it in quotes" + ("" if hidden else f': "{_shown(value)}"')
    below = limits.lt if limits and isinstance(value, int) else None
    huge = f", and less than {below:,}" if below is not None and value >= below else ""
    return f"{given}: expected {expected(hint)}{huge}{quotes}"


def expected(hint: Any) -> str:
    """What a value of a type is, in words, with its limits."""
    bare, limits = _bare(hint), _limits(hint)
    if limits and limits.description:
        return limits.description
    if get_origin(bare) is tuple:
        return "a list"
    if get_origin(bare) is dict:
        return "names with values"
    words = [_NAMES[kind] for kind in _alternatives(bare) if kind in _NAMES]
    choices = [str(choice) for choice in _choices(bare) if choice != ""]
    if choices:
        words.append(f"one of {', '.join(choices)}" if not words else " or ".join(repr(choice) for choice in choices))
    return _within(" or ".join(words), limits) if limits else " or ".join(words)


def _within(text: str, limits: msgspec.Meta) -> str:
    if limits.ge is not None and limits.le is not None:
        return f"{text} between {limits.ge} and {limits.le}"
    if limits.ge is not None:
        return f"{text}, {limits.ge} or more"
    if limits.gt is not None:
        return text.replace("a number", "a positive number") if limits.gt == 0 else f"{text} above {limits.gt}"
    return text


def _bare(hint: Any) -> Any:
    """A type without its limits."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _limits(hint: Any) -> msgspec.Meta | None:
    """The limits of a type, or of the one among several that has some."""
    found = (item for part in (hint, *_parts(hint)) for item in getattr(part, "__metadata__", ()))
    return next(found, None)


def _parts(hint: Any) -> tuple[Any, ...]:
    bare = _bare(hint)
    return get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have, without their limits."""
    return tuple(_bare(part) for part in _parts(hint))


def _choices(hint: Any) -> tuple[Any, ...]:
    """The words or numbers that a value may be, if only some may."""
    return tuple(choice for part in _alternatives(hint) if get_origin(part) is Literal for choice in get_args(part))


def _shown(value: Any) -> str:
    """A wrong value in one short line."""
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a group"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return "a huge number"  # Python refuses to write the longest ones
    text = str(value) if str(value).isprintable() else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
