"""Recipes of bad input: a YAML file of them each, what they may do to files, and the line that each must give.

After a deliberate change of a message: REWRITE_BAD_INPUT=1 python -m pytest tests/bad_input, then read the diff.
"""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from _pytest.mark import ParameterSet
from PIL import Image

from tests.builders import edit_json

_REWRITE = bool(os.environ.get("REWRITE_BAD_INPUT"))
_RECIPES: dict[Path, list[dict[str, Any]]] = {}


def recipes(name: str) -> list[dict[str, Any]]:
    """The recipes of a file."""
    file = Path(__file__).with_name(f"{name}.yaml")
    return _RECIPES.setdefault(file, yaml.safe_load(file.read_text()))


def parameters(content: list[dict[str, Any]]) -> list[ParameterSet]:
    """Recipes as the parameters of a test; some import what takes seconds."""
    slow = {recipe["name"]: [pytest.mark.slow] if recipe.get("slow") else [] for recipe in content}
    assert len(slow) == len(content), "two recipes of one name"
    return [pytest.param(recipe, marks=slow[recipe["name"]], id=recipe["name"]) for recipe in content]


def check_line(recipe: dict[str, Any], line: str) -> None:
    """Compare with the recipe what came of it: one line, without what a terminal would obey."""
    if _REWRITE:
        recipe["line"] = line
        return
    assert line == recipe["line"]
    assert line.isprintable()


def rewrite() -> None:
    """Write the lines that were found into the recipes, if asked to."""
    for file, content in _RECIPES.items() if _REWRITE else ():
        head = "".join(line for line in file.read_text().splitlines(True) if line.startswith("#"))
        file.write_text(head + yaml.safe_dump(content, sort_keys=False, width=10_000, allow_unicode=True))


def follow(recipe: dict[str, Any], root: Path) -> None:
    """Do to the files below a folder what a recipe says."""
    for verb, *arguments in recipe.get("do", ()):
        VERBS[verb](root, *arguments)


# The verbs of recipes: each makes or changes one file.


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def as_bytes(root: Path, name: str, content: str) -> None:
    (root / name).write_bytes(bytes.fromhex(content))


def nested(root: Path, name: str, depth: int) -> None:
    (root / name).write_text("[" * depth + "]" * depth)


def cut(root: Path, name: str, keep: int) -> None:
    (root / name).write_bytes((root / name).read_bytes()[:keep])


def flip(root: Path, name: str, behind: str) -> None:
    """Flip a bit 60 bytes behind where some bytes are first found; in the middle of the file if none are given."""
    content = bytearray((root / name).read_bytes())
    offset = content.index(bytes.fromhex(behind)) + 60 if behind else len(content) // 2
    content[offset] ^= 1
    (root / name).write_bytes(content)


def remove(root: Path, name: str) -> None:
    file = root / name
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink()


def copy(root: Path, name: str, other: str) -> None:
    shutil.copy(root / name, root / other)


def move(root: Path, name: str, other: str) -> None:
    (root / other).parent.mkdir(parents=True, exist_ok=True)
    (root / name).rename(root / other)


def link(root: Path, name: str, target: str) -> None:
    (root / name).unlink()
    (root / name).symlink_to(target)


def fifo(root: Path, name: str) -> None:
    (root / name).unlink()
    os.mkfifo(root / name)


def sparse(root: Path, name: str, size: int) -> None:
    with (root / name).open("wb") as file:
        file.truncate(size)


def enlarge(root: Path, name: str, text: str, size: int) -> None:
    (root / name).write_text((root / name).read_text().replace(text, "x" * size))


def raw_set(root: Path, name: str, old: str, new: str) -> None:
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))


def change(root: Path, name: str, keys: list[Any], value: Any) -> None:
    edit_json(root / name, lambda content: _parent(content, keys).__setitem__(keys[-1], value))


def drop(root: Path, name: str, keys: list[Any]) -> None:
    edit_json(root / name, lambda content: _parent(content, keys).__delitem__(keys[-1]))


def _parent(content: Any, keys: list[Any]) -> Any:
    for key in keys[:-1]:
        content = content[key]
    return content


def bomb(root: Path, name: str, side: int) -> None:
    """A few bytes that claim to be so many pixels wide and high."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    (root / name).write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def painted(root: Path, name: str, kind: str, mode: str) -> None:
    Image.new(mode, (8, 8)).save(root / name, kind)


def laughs(root: Path, name: str) -> None:
    """An XML file of 1 KB that would be 3 GB in memory."""
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    head = f'<!DOCTYPE annotation [<!ENTITY e0 "lol">{entities}]>'
    (root / name).write_text(f"{head}<annotation><object><name>&e9;</name></object></annotation>")


def odd_name(root: Path, name: str) -> None:
    (root / name).rename(os.fsdecode(os.fsencode(root / name) + b"\xff"))


def odd_file(root: Path, name: str) -> None:
    odd_name(root, f"{name}/00.jpg")
    next((root / name).glob("00*")).rename(os.fsdecode(os.fsencode(root / name) + b"/\xff.jpg"))


def parquet(root: Path, name: str, column: str, row: int, value: Any) -> None:
    table = pq.read_table(root / name)
    values = table[column].to_pylist()
    values[row] = value
    field = table.schema.field(column)
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), root / name)


def parquet_text(root: Path, name: str, column: str) -> None:
    table = pq.read_table(root / name)
    texts = pa.array(["x"] * table.num_rows)
    pq.write_table(table.set_column(table.column_names.index(column), column, texts), root / name)


def parquet_drop(root: Path, name: str, column: str) -> None:
    pq.write_table(pq.read_table(root / name).drop_columns([column]), root / name)


def parquet_plain(root: Path, name: str) -> None:
    pq.write_table(pq.read_table(root / name).replace_schema_metadata(None), root / name)


def header(root: Path, name: str, keys: list[Any], value: Any) -> None:
    """Set a value in the header of a safetensors file; its tensors stay."""
    content = (root / name).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    head = json.loads(content[8:end])
    _parent(head, keys)[keys[-1]] = value
    text = json.dumps(head).encode()
    (root / name).write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


def length(root: Path, name: str, size: int) -> None:
    """Let a safetensors file say that its header has so many bytes."""
    (root / name).write_bytes(struct.pack("<Q", size) + (root / name).read_bytes()[8:])


def metadata(root: Path, name: str, text: str | int) -> None:
    """Set what the metadata of a Parquet file say of its rows; a number stands for so many brackets."""
    content = text if isinstance(text, str) else "[" * text
    pq.write_table(pq.read_table(root / name).replace_schema_metadata({"csc": content}), root / name)


VERBS: dict[str, Callable[..., None]] = {
    **{made.__name__: made for made in (write, nested, cut, flip, remove, copy, move, link, fifo, sparse, enlarge)},
    **{made.__name__: made for made in (raw_set, drop, bomb, laughs, odd_name, odd_file)},
    **{made.__name__: made for made in (parquet, parquet_text, parquet_drop, parquet_plain)},
    **{made.__name__: made for made in (header, length, metadata)},
    "bytes": as_bytes,
    "set": change,
    "picture": painted,
}
