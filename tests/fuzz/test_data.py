"""Parsers of foreign files, given mutated ones: a result or one line, never a traceback, soon, in little memory.

`make fuzz` runs this with more examples and a limit on memory. `seeds/` has the files that mutations start from: small
valid ones, and such that once led to a traceback. FUZZ_EXAMPLES says how many mutations of each parser are tried.
"""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csc.data.dataset import Dataset
from csc.data.ingest.classes import in_order, read_class_order
from csc.data.ingest.coco_annotations import AnnotationFile, read_annotations
from csc.data.ingest.csv_table import ingest_csv
from csc.data.ingest.images import checked_jpeg, scaled_down
from csc.data.ingest.source import Source
from csc.data.ingest.voc import ingest_voc
from csc.data.shards import read_index
from csc.data.views import read_view
from csc.errors import CscError

pytestmark = pytest.mark.slow

SEEDS = Path(__file__).parent / "seeds"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
TOKENS = [b"null", b"-1", b"1e999", b"[]", b"\\ud800", b"\x00", b"\xff", b"[" * 2000, b"9" * 40, b"<", b"&", b'"', b","]


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> bytes:
    """A seed in which a few bytes were changed, cut out, doubled or replaced by something that parsers dislike."""
    content = bytearray(draw(st.sampled_from(sorted(SEEDS.glob(kind)))).read_bytes())
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.integers(1, 40))
        change = draw(st.sampled_from(["byte", "cut", "double", "token"]))
        if change == "byte" and content:
            content[place] = draw(st.integers(0, 255))
        elif change == "cut":
            del content[place : place + length]
        elif change == "double":
            content[place:place] = content[place : place + length]
        else:
            content[place:place] = draw(st.sampled_from(TOKENS))
    return bytes(content)


def fuzz(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with mutations of the seeds of one kind."""
    limits = settings(
        max_examples=EXAMPLES, deadline=5000, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    return lambda test: limits(given(content=mutated(kind))(test))


def attempt(action: Callable[[], object]) -> None:
    """A refusal must be one line."""
    message = ""
    try:
        action()
    except CscError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


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
    attempt(lambda: read_view(file))


def test_every_seed_is_used_by_a_parser():
    kinds = ("*.json", "*.xml", "*.txt", "*.csv", "[0-9].*", "*.zip", "*.parquet")
    used = {file for kind in kinds for file in SEEDS.glob(kind)}
    assert used == set(SEEDS.iterdir())
    assert all(list(SEEDS.glob(kind)) for kind in kinds)
