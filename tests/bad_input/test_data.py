"""Bad data of every kind gives the one line that its recipe in `data.yaml` says, and nothing is written."""

import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.class_folders import ingest_folder
from csc.data.ingest.classes import read_class_order
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.csv_table import ingest_csv
from csc.data.ingest.writer import WriteOptions
from csc.data.shards import ImageShards
from csc.data.views import View, train_view
from csc.errors import CscError
from csc.scenario import Scenario
from tests.bad_input.recipes import VERBS, check_line, follow, parameters, recipes
from tests.builders import ingest_voc2007, make_coco, make_voc, picture, zipped

RECIPES = recipes("data")


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
    offset = content.rindex(b"train2014/000000000003.jpeg") - 46  # of its entry in the directory
    content[offset + 24 : offset + 28] = struct.pack("<I", 0xF0000000)
    raw.write_bytes(content)
    return raw, lambda: ingest_coco(raw, folder / "set", "animals")


def encrypted_zip(folder: Path) -> Given:
    raw, _ = packed(folder)
    content = bytearray(raw.read_bytes())
    offset = -1
    while (offset := content.find(b"PK\x01\x02", offset + 1)) >= 0:
        content[offset + 8] |= 1
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
    """A data set of before its labels and its card had digests."""
    made, _ = dataset(folder)
    VERBS["drop"](made, "dataset.json", ["labels_sha256"])
    VERBS["drop"](made, "dataset.json", ["digest"])
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
    train_view(Dataset.open(made), task).write(made / "view.parquet")
    return made, lambda: View.read(made / "view.parquet")


GIVEN: dict[str, Callable[[Path], Given]] = {
    **{made.__name__: made for made in (coco, big_zip, encrypted_zip, empty_zip, tar, one_file, nothing, voc, csv)},
    **{made.__name__: made for made in (order, dataset, unsigned, images, far_row, view)},
    "zip": packed,
    "folder": folders,
}


def line_of(recipe: dict[str, Any], folder: Path) -> str:
    """The line that the recipe gives."""
    root, act = GIVEN[recipe["given"]](folder)
    follow(recipe, root)
    with pytest.raises(CscError) as caught:
        act()
    assert not (folder / "set").exists()
    return str(caught.value).replace(str(folder / "raw"), "{raw}").replace(str(folder), "{folder}")


@pytest.mark.parametrize("recipe", parameters(RECIPES))
def test_bad_data_gives_the_one_line_of_its_recipe(recipe: dict[str, Any], tmp_path: Path):
    check_line(recipe, line_of(recipe, tmp_path))


def test_there_are_recipes_of_every_kind():
    assert {recipe["given"] for recipe in RECIPES} == set(GIVEN)
