"""Parsers of foreign data, given files that somebody changed: a value, or one line, and never anything else.

`make fuzz` runs this with more examples and a limit on memory.
"""

from pathlib import PurePosixPath

import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.classes import in_order, read_class_order
from csc.data.ingest.coco_annotations import AnnotationFile, read_annotations
from csc.data.ingest.csv_table import ingest_csv
from csc.data.ingest.images import checked_jpeg, scaled_down
from csc.data.ingest.source import Source
from csc.data.ingest.voc import ingest_voc
from csc.data.shards import read_index
from csc.data.views import View
from tests.fuzz.mutations import SEEDS, attempt, fuzz

pytestmark = pytest.mark.slow


@fuzz("*.json")
def test_annotations_of_coco(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("coco")
    (folder / "a.json").write_bytes(content)
    (folder / "1.jpg").write_bytes(b"")
    with Source(folder) as files:
        attempt(lambda: read_annotations(files, AnnotationFile(PurePosixPath("a.json"), None, (PurePosixPath(),))))


@fuzz("*.json")
def test_cards_of_data_sets(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("set")
    (folder / "dataset.json").write_bytes(content)
    (folder / "index.json").write_bytes(content)
    attempt(lambda: Dataset.open(folder))
    attempt(lambda: read_index(str(folder), "ingest again"))


@fuzz("*.xml")
def test_annotations_of_voc(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("voc")
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for number, name in enumerate(("train.txt", "val.txt")):
        (folder / "ImageSets/Main" / name).write_text(f"{number}\n")
        (folder / "Annotations" / f"{number}.xml").write_bytes(content)
        (folder / "JPEGImages" / f"{number}.jpg").write_bytes((SEEDS / "1.jpg").read_bytes())
    attempt(lambda: ingest_voc(folder, folder / "set", "any"))


@fuzz("*.txt")
def test_lists_of_voc_and_class_orders(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("lists")
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for name in ("train.txt", "val.txt"):
        (folder / "ImageSets/Main" / name).write_bytes(content)
    attempt(lambda: ingest_voc(folder, folder / "set", "any"))
    attempt(lambda: in_order(["cat"], read_class_order(folder / "ImageSets/Main/train.txt")))


@fuzz("*.csv")
def test_csv_files(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("csv")
    (folder / "labels.csv").write_bytes(content)
    for name in ("1.jpg", "2.jpg"):
        (folder / name).write_bytes((SEEDS / "1.jpg").read_bytes())
    attempt(lambda: ingest_csv(folder, folder / "set", "any"))


@fuzz("[0-9].*")
def test_images(content: bytes):
    attempt(lambda: checked_jpeg(content, "an image"))


@fuzz("[0-9].*")
def test_images_that_are_scaled_down(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    def scaled() -> object:
        image = checked_jpeg(content, "an image")
        return scaled_down(content, 4) if min(image.width, image.height) > 4 else image

    attempt(scaled)


@fuzz("*.zip")
def test_zips(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("zip") / "raw"
    file.write_bytes(content)

    def read_all() -> None:
        with Source(file) as files:
            for folder in ("", *files.folders()):
                for name in files.names(folder):
                    files.read(PurePosixPath(folder) / name)

    attempt(read_all)


@fuzz("*.parquet")
def test_views(content: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("view") / "view.parquet"
    file.write_bytes(content)
    attempt(lambda: View.read(file))
