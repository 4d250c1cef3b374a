"""Bad data of every kind gives the one line that its recipe in `data.yaml` says, and nothing is written."""

import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from csc.data.dataset import Dataset
from csc.data.ingest.class_folders import ingest_folder
from csc.data.ingest.classes import read_class_order
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.csv_table import ingest_csv
from csc.data.ingest.voc import ingest_voc2007
from csc.data.ingest.writer import WriteOptions
from csc.data.shards import ImageShards
from csc.data.views import read_view, train_view, write_view
from csc.errors import CscError
from csc.scenario import Scenario
from tests.builders import edit_json, make_coco, make_voc, picture, zipped

RECIPES = Path(__file__).with_name("data.yaml")
RECIPE = yaml.safe_load(RECIPES.read_text())


# The verbs of recipes: each changes one file of a valid set.


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
    """Flip a bit 60 bytes behind the first place of some bytes; in the middle of the file if none are given."""
    content = bytearray((root / name).read_bytes())
    place = content.index(bytes.fromhex(behind)) + 60 if behind else len(content) // 2
    content[place] ^= 1
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
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), root / name)


def parquet_text(root: Path, name: str, column: str) -> None:
    table = pq.read_table(root / name)
    texts = pa.array(["x"] * table.num_rows)
    pq.write_table(table.set_column(table.column_names.index(column), column, texts), root / name)


def parquet_drop(root: Path, name: str, column: str) -> None:
    pq.write_table(pq.read_table(root / name).drop_columns([column]), root / name)


def parquet_plain(root: Path, name: str) -> None:
    pq.write_table(pq.read_table(root / name).replace_schema_metadata(None), root / name)


VERBS: dict[str, Callable[..., None]] = {
    **{made.__name__: made for made in (write, nested, cut, flip, remove, copy, move, link, fifo, sparse, enlarge)},
    **{made.__name__: made for made in (raw_set, drop, bomb, laughs, odd_name, odd_file)},
    **{made.__name__: made for made in (parquet, parquet_text, parquet_drop, parquet_plain)},
    "bytes": as_bytes,
    "set": change,
    "picture": painted,
}


# The sets that recipes change: each is made in a folder, and gives what to change and what must then be refused.

Given = tuple[Path, Callable[[], object]]


def coco(folder: Path) -> Given:
    raw = make_coco(folder / "raw")
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def packed(folder: Path) -> Given:
    raw = zipped(make_coco(folder / "unpacked"), folder / "raw")
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def big_zip(folder: Path) -> Given:
    """A zip whose directory says that an image has 5 GB."""
    raw, _ = packed(folder)
    content = bytearray(raw.read_bytes())
    place = content.rindex(b"train2014/000000000003.jpeg") - 46  # of its entry in the directory
    content[place + 24 : place + 28] = struct.pack("<I", 0xF0000000)
    raw.write_bytes(content)
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def encrypted_zip(folder: Path) -> Given:
    raw, _ = packed(folder)
    content = bytearray(raw.read_bytes())
    place = -1
    while (place := content.find(b"PK\x01\x02", place + 1)) >= 0:
        content[place + 8] |= 1
    raw.write_bytes(content)
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def empty_zip(folder: Path) -> Given:
    zipfile.ZipFile(folder / "raw", "w").close()
    return folder / "raw", lambda: ingest_coco(folder / "raw", folder / "set", "animals")


def tar(folder: Path) -> Given:
    raw = folder / "raw.tar"
    tarfile.open(raw, "w").close()
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def one_file(folder: Path) -> Given:
    raw = make_coco(folder / "raw")
    return raw, lambda: ingest_coco(raw / "annotations/instances_train2014.json", folder / "set", "animals")


def nothing(folder: Path) -> Given:
    return folder, lambda: ingest_coco(folder / "raw", folder / "set", "animals")


def voc(folder: Path) -> Given:
    raw = make_voc(folder / "raw")
    return raw, lambda: ingest_voc2007(raw, folder / "set")


def csv(folder: Path) -> Given:
    raw = folder / "raw"
    raw.mkdir()
    for number in range(3):
        (raw / f"{number}.jpg").write_bytes(picture(number, 8, 8))
    (raw / "labels.csv").write_text("image,labels,split\n0.jpg,cat,train\n1.jpg,,test\n")
    return raw, lambda: ingest_csv(raw, folder / "set", "pets")


def folders(folder: Path) -> Given:
    raw = folder / "raw"
    for name in ("cat", "dog"):
        (raw / name).mkdir(parents=True)
        for number in range(12):
            (raw / name / f"{number:02d}.jpg").write_bytes(picture(number, 8, 8))
    return raw, lambda: ingest_folder(raw, folder / "set", "pets")


def order(folder: Path) -> Given:
    raw, file = make_coco(folder / "source"), folder / "raw"
    file.write_text("zebra\ndog\ncat\nbird\n")
    return file, lambda: ingest_coco(
        raw, folder / "set", "animals", WriteOptions(class_order=read_class_order(folder / "raw"))
    )


def dataset(folder: Path) -> Given:
    made = ingest_coco(make_coco(folder / "source"), folder / "raw", "animals")
    return made.path, lambda: Dataset.open(made.path).labels()


def unsigned(folder: Path) -> Given:
    """A data set of before its labels had a digest."""
    made, _ = dataset(folder)
    drop(made, "dataset.json", ["labels_sha256"])
    return made, lambda: Dataset.open(made).labels()


def images(folder: Path) -> Given:
    made, _ = dataset(folder)
    return made, lambda: ImageShards(made / "images").jpeg(0, 0)


def far_row(folder: Path) -> Given:
    made, _ = dataset(folder)
    return made, lambda: ImageShards(made / "images").jpeg(0, 99)


def view(folder: Path) -> Given:
    made, _ = dataset(folder)
    opened = msgspec.structs.replace(Dataset.open(made), uri="set")
    task = Scenario.parse("animals-b0c2").task(opened.classes, 1)
    write_view(train_view(Dataset.open(made), task), made / "view.parquet")
    return made, lambda: read_view(made / "view.parquet")


GIVEN: dict[str, Callable[[Path], Given]] = {
    **{made.__name__: made for made in (coco, big_zip, encrypted_zip, empty_zip, tar, one_file, nothing, voc, csv)},
    **{made.__name__: made for made in (order, dataset, unsigned, images, far_row, view)},
    "zip": packed,
    "folder": folders,
}


def line_of(recipe: dict[str, Any], folder: Path) -> str:
    """The line that the recipe gives."""
    root, act = GIVEN[recipe["given"]](folder)
    for verb, *arguments in recipe["do"]:
        VERBS[verb](root, *arguments)
    with pytest.raises(CscError) as caught:
        act()
    assert not (folder / "set").exists()
    return str(caught.value).replace(str(folder / "raw"), "{raw}").replace(str(folder), "{folder}")


@pytest.mark.parametrize("recipe", RECIPE, ids=lambda recipe: recipe["name"])
def test_bad_data_gives_the_one_line_of_its_recipe(recipe: dict[str, Any], tmp_path: Path):
    line = line_of(recipe, tmp_path)
    if os.environ.get("REWRITE_BAD_INPUT"):
        recipe["line"] = line
        return
    assert line == recipe["line"]
    assert line.isprintable()


def test_there_are_recipes_of_every_kind():
    assert {recipe["given"] for recipe in RECIPE} == set(GIVEN)
    assert {step[0] for recipe in RECIPE for step in recipe["do"]} == set(VERBS)
    assert len({recipe["name"] for recipe in RECIPE}) == len(RECIPE)


@pytest.fixture(scope="module", autouse=True)
def rewritten() -> Any:
    """Write the lines that were found into the recipes, if asked to."""
    yield
    if os.environ.get("REWRITE_BAD_INPUT"):
        head = "".join(line for line in RECIPES.read_text().splitlines(True) if line.startswith("#"))
        RECIPES.write_text(head + yaml.safe_dump(RECIPE, sort_keys=False, width=10_000, allow_unicode=True))
