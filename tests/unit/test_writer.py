"""Data sets are made from listings: the same bytes whoever makes them, resumed where an earlier attempt stopped."""

import collections
import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

import csc.data.ingest.images
import csc.data.ingest.shard_writer
import csc.data.ingest.workers
from csc.data.dataset import Dataset, card_digest
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.images import Encoded, ListedImage, SourceImages
from csc.data.ingest.output import Output
from csc.data.ingest.shard_writer import Part
from csc.data.ingest.source import Source
from csc.data.ingest.writer import SourceListing, WriteOptions, write_dataset
from csc.data.shards import ImageShards
from csc.errors import BadData, CscError
from csc.storage import delete, list_below, read_bytes, sha256_file, upload, write_bytes
from tests.builders import contents, edit_json, ingest_voc2007, make_coco, make_voc, picture, zipped

pytest_plugins = ["tests.s3"]

CLASSES = ("bird", "cat", "dog")
SOURCE = {"kind": "test"}
VALID = (
    ListedImage("a", "train", ("dog", "bird"), (), ""),
    ListedImage("b", "train", ("cat",), ("dog",), ""),
    ListedImage("c", "train", (), (), ""),
    ListedImage("d", "test", ("cat",), (), ""),
    ListedImage("e", "test", (), ("bird",), ""),
)
LONG = tuple(
    ListedImage(f"{row:02d}", "train" if row < 9 else "test", (CLASSES[row % 3],), (), "") for row in range(12)
)


@dataclass(frozen=True)
class Pictures:
    """Images for any listing; notes in a file what is read, and fails where it is told to."""

    log: Path | None = None
    fails: dict[str, Exception | None] = field(default_factory=dict)  # by image id; None kills the first process
    jpegs: dict[str, bytes] = field(default_factory=dict)

    def __call__(self, rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        for row in rows:
            if row.image_id in self.fails:
                error = self.fails[row.image_id]
                if error is None:
                    os.kill(int(os.environ["FIRST_PROCESS"]), signal.SIGKILL)
                    signal.pause()
                raise error
            if self.log is not None:
                with self.log.open("a") as log:
                    log.write(f"{row.image_id}\n")
            yield Encoded(self.jpegs.get(row.image_id) or jpeg_of(row), 8, 8)

    def read(self) -> list[str]:
        """The ids that were read, in order."""
        return sorted(self.log.read_text().split()) if self.log is not None and self.log.exists() else []


PICTURES = Pictures()


def jpeg_of(row: ListedImage) -> bytes:
    return picture(sum(row.image_id.encode()), 8, 8)


def write(
    out: Path | str,
    listing: Iterable[ListedImage] = VALID,
    images: Callable[..., Any] = PICTURES,
    *,
    name: str = "animals",
    classes: Sequence[str] = CLASSES,
    source: dict[str, Any] = SOURCE,
    difficult_is_member: bool = False,
    **options: Any,
) -> Dataset:
    found = SourceListing(classes, listing, source, difficult_is_member)
    return write_dataset(out, name, found, images, **options)


def state_of(name: str) -> Callable[[Sequence[ListedImage]], str]:
    return lambda rows: name


def replaced(index: int, **values: Any) -> list[ListedImage]:
    listing = list(VALID)
    listing[index] = listing[index]._replace(**values)
    return listing


def refusal(action: Callable[[], object], kind: type[CscError] = BadData) -> str:
    with pytest.raises(CscError) as caught:
        action()
    assert isinstance(caught.value, BadData) == (kind is BadData)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def shard_rows(dataset: Dataset) -> dict[tuple[int, int], dict[str, Any]]:
    """Everything in the image shards, by position."""
    rows = {}
    for path in sorted(Path(dataset.shards_uri).glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all().to_pylist()
        rows |= {(int(path.stem), row): content for row, content in enumerate(table)}
    return rows


def test_a_written_data_set_reads_as_it_was_given(tmp_path: Path):
    dataset = write(tmp_path / "set", difficult_is_member=True)
    assert dataset == Dataset.open(str(tmp_path / "set"))
    assert (dataset.name, dataset.classes, dataset.source) == ("animals", CLASSES, SOURCE)
    assert dataset.difficult_is_member
    assert dataset.splits == {"train": {"images": 3, "labelled": 2}, "test": {"images": 2, "labelled": 1}}
    assert [tuple(row.values()) for row in dataset.labels().to_pylist()] == [
        ("a", "train", 0, 0, ["bird", "dog"], []),
        ("b", "train", 0, 1, ["cat"], ["dog"]),
        ("c", "train", 0, 2, [], []),
        ("d", "test", 0, 3, ["cat"], []),
        ("e", "test", 0, 4, [], ["bird"]),
    ]
    assert [tuple(row.values()) for row in shard_rows(dataset).values()] == [
        (given.image_id, jpeg_of(given), 8, 8) for given in VALID
    ]
    assert set(contents(dataset.path)) == {
        "dataset.json", "labels.parquet", "images", "images/00000.arrow", "images/index.json"
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_the_fingerprint_of_these_images_has_never_changed(tmp_path: Path):
    """Computed by the first version that wrote data sets; results name it."""
    fixed = {row.image_id: row.image_id.encode() for row in VALID}
    dataset = write(tmp_path / "set", images=Pictures(jpegs=fixed))
    assert dataset.fingerprint == "1e3c671f71a23fa960f7f8394edfe500be723e73781b75eec005ec766753f696"


def test_the_info_file_is_plain_json(tmp_path: Path):
    dataset = write(tmp_path / "set")
    info = json.loads((dataset.path / "dataset.json").read_text())
    assert info.pop("digest") == card_digest(info)
    assert info == {
        "name": "animals",
        "classes": ["bird", "cat", "dog"],
        "splits": dataset.splits,
        "fingerprint": dataset.fingerprint,
        "source": SOURCE,
        "difficult_is_member": False,
        "labels_sha256": sha256_file(tmp_path / "set" / "labels.parquet"),
    }


def test_classes_are_sorted_whatever_their_order(tmp_path: Path):
    given, turned = write(tmp_path / "a"), write(tmp_path / "b", classes=CLASSES[::-1])
    assert turned.classes == CLASSES
    assert given.fingerprint == turned.fingerprint


def test_a_label_given_twice_counts_once_and_hides_the_difficult_one(tmp_path: Path):
    dataset = write(tmp_path / "set", replaced(0, labels=("dog", "dog", "bird"), difficult=("dog", "cat", "cat")))
    first = dataset.labels().to_pylist()[0]
    assert (first["labels"], first["difficult"]) == (["bird", "dog"], ["cat"])


def stolen() -> Iterator[ListedImage]:
    yield from VALID[:3]
    raise BadData("image d: cannot be read")


# What is handed over, and the words that the answer must have.
BAD: dict[str, tuple[Callable[[], Iterable[ListedImage]], tuple[str, ...]]] = {
    "id twice": (lambda: [VALID[0], VALID[0], *VALID[1:]], ("image a", "twice")),
    "id in both splits": (lambda: [*VALID, ListedImage("a", "test", ("cat",), (), "")], ("image a", "twice")),
    "unknown class": (lambda: replaced(1, labels=("cat", "yak")), ("image b", "'yak'", "bird, cat, dog")),
    "unknown difficult": (lambda: replaced(4, difficult=("yak",)), ("image e", "'yak'", "bird, cat, dog")),
    "class of no image": (lambda: [*VALID[:1], *VALID[2:]], ("'cat'", "no training image")),
    "class in test only": (lambda: replaced(1, labels=()), ("'cat'", "no training image")),
    "class only difficult": (lambda: replaced(0, labels=("bird",)), ("'dog'", "no training image")),
    "no test images": (lambda: VALID[:3], ("no test images",)),
    "no training images": (lambda: VALID[3:], ("no training image",)),
    "no images": (lambda: [], ("no images",)),
    "reader fails midway": (stolen, ("image d", "cannot be read")),
}


@pytest.mark.parametrize(("listing", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("there", [False, True], ids=["new", "existing"])
def test_bad_listings_are_refused_before_an_image_is_read(
    listing: Callable[[], Iterable[ListedImage]], words: Sequence[str], there: bool, tmp_path: Path
):
    if there:
        write(tmp_path / "folder" / "set")
    (tmp_path / "folder").mkdir(exist_ok=True)
    before = contents(tmp_path)
    message = refusal(lambda: write(tmp_path / "folder" / "set", listing(), lambda _: pytest.fail("read")))
    for word in words:
        assert word in message
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("workers", "path"), [(1, "set"), (1, "new/folders/set"), (2, "new/folders/set")])
def test_a_bad_image_in_the_first_shard_leaves_nothing(workers: int, path: str, tmp_path: Path):
    bad = {row.image_id: BadData(f"{row.image_id}: broken image") for row in LONG[1::2]}
    options = WriteOptions(workers=workers, shard_rows=3)
    assert refusal(lambda: write(tmp_path / path, LONG, Pictures(fails=bad), options=options)) == "01: broken image"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_image_costs_no_shard_but_its_own(workers: int, tmp_path: Path):
    bad = {"10": BadData("10: broken image"), "07": BadData("07: broken image")}
    options = WriteOptions(workers=workers, shard_rows=3)
    assert refusal(lambda: write(tmp_path / "set", LONG, Pictures(fails=bad), options=options)) == "07: broken image"
    assert "not a data set" in refusal(lambda: Dataset.open(tmp_path / "set"))
    images = Pictures(tmp_path / "log")
    dataset = write(tmp_path / "set", LONG, images, options=options)
    assert images.read() == [row.image_id for row in LONG[6:]]
    assert contents(dataset.path) == contents(write(tmp_path / "clean", LONG, options=options).path)


@pytest.mark.parametrize("kind", ["files", "a file", "hidden file", "another project's dataset.json"])
def test_a_folder_that_is_not_a_data_set_is_never_touched(kind: str, tmp_path: Path):
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("the only copy")
    else:
        out.mkdir()
        name = {"files": "thesis.txt", "hidden file": ".thesis"}.get(kind, "dataset.json")
        (out / name).write_text('{"title": "the only copy"}')
    before = contents(tmp_path)
    assert str(out) in refusal(lambda: write(out))
    assert contents(tmp_path) == before


def test_an_empty_folder_is_filled(tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert write(tmp_path / "out").splits["train"]["images"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"listing": replaced(0, labels=("dog", "bird", "cat"))},
        {"images": Pictures(jpegs={"e": picture(7, 8, 8)})},
        {"name": "beasts"},
    ],
    ids=["label", "image", "name"],
)
def test_another_data_set_that_is_there_is_kept(change: dict[str, Any], tmp_path: Path):
    write(tmp_path / "set")
    before = contents(tmp_path)
    message = refusal(lambda: write(tmp_path / "set", **change))
    assert message.startswith(f"{tmp_path / 'set'}: already contains another data set")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("shard_rows", [1024, 2])
def test_the_same_data_set_that_is_there_is_left_alone(shard_rows: int, tmp_path: Path):
    first = write(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert write(tmp_path / "set", options=WriteOptions(shard_rows=shard_rows)) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_same_data_set_is_left_alone_where_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = write(tmp_path / "set")
    monkeypatch.setattr("csc.data.ingest.writer.resume", lambda *_: pytest.fail("tried to write"))
    assert write(tmp_path / "set") == first


@pytest.mark.parametrize("there", [False, True], ids=["empty", "same data set"])
@pytest.mark.parametrize("spelled", [".", "", "../set"])
def test_the_present_folder_is_filled_or_refused_but_never_damaged(
    spelled: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "set").mkdir()
    if there:
        write(tmp_path / "set")
    monkeypatch.chdir(tmp_path / "set")
    before = contents(tmp_path)
    try:
        write(spelled)
    except BadData:
        assert contents(tmp_path) == before
    else:
        assert Dataset.open(tmp_path / "set").labels().num_rows == 5
        assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_link_may_be_the_target(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "set").symlink_to(tmp_path / "disk")
    write(tmp_path / "set")
    assert Dataset.open(tmp_path / "set").labels().num_rows == 5
    assert (tmp_path / "set").is_symlink()


@pytest.mark.parametrize("name", ["set", "~no-such-user/set", "gs://bucket/set"])
def test_a_target_that_cannot_be_written_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("the only copy")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert name in refusal(lambda: write(f"file/{name}" if name == "set" else name))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("per_shard", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("batch_rows", [1, 2, 256])
def test_a_full_shard_is_followed_by_another_and_positions_are_right(
    per_shard: int, batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(csc.data.ingest.shard_writer, "BATCH_ROWS", batch_rows)
    dataset = write(tmp_path / "set", options=WriteOptions(shard_rows=per_shard))
    positions = [(row["shard"], row["row"]) for row in dataset.labels().to_pylist()]
    assert positions == [divmod(index, per_shard) for index in range(5)]
    assert {position: row["image_id"] for position, row in shard_rows(dataset).items()} == dict(
        zip(positions, "abcde", strict=True)
    )
    shards = ImageShards(dataset.shards_uri)
    assert [bytes(shards.jpeg(*position)) for position in positions] == [jpeg_of(given) for given in VALID]


def test_the_index_has_rows_bytes_and_hash_of_each_shard(tmp_path: Path):
    dataset = write(tmp_path / "set", options=WriteOptions(shard_rows=2))
    files = sorted(Path(dataset.shards_uri).glob("*.arrow"))
    assert json.loads((Path(dataset.shards_uri) / "index.json").read_text()) == [
        {"rows": rows, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for rows, path in zip((2, 2, 1), files, strict=True)
    ]


def test_the_order_of_a_listing_does_not_matter(tmp_path: Path):
    assert contents(write(tmp_path / "a", VALID[::-1]).path) == contents(write(tmp_path / "b").path)


def test_the_fingerprint_does_not_depend_on_how_images_are_sharded(tmp_path: Path):
    one, many = write(tmp_path / "one"), write(tmp_path / "many", options=WriteOptions(shard_rows=1))
    assert len(list(Path(many.shards_uri).glob("*.arrow"))) == 5
    assert one.fingerprint == many.fingerprint


CHANGES: dict[str, dict[str, Any]] = {
    "pixel": {"images": Pictures(jpegs={"a": picture(7, 8, 8)})},
    "pixel of a test image": {"images": Pictures(jpegs={"e": picture(7, 8, 8)})},
    "label added": {"listing": replaced(0, labels=("dog", "bird", "cat"))},
    "label removed": {"listing": replaced(3, labels=())},
    "label becomes difficult": {"listing": replaced(3, labels=(), difficult=("cat",))},
    "difficult removed": {"listing": replaced(4, difficult=())},
    "id": {"listing": replaced(4, image_id="f")},
    "split": {"listing": replaced(2, split="test")},
    "image added": {"listing": [*VALID, ListedImage("f", "test", ("cat",), (), "")]},
    "image removed": {"listing": VALID[:4]},
    "class renamed": {
        "classes": ("bird", "cat", "wolf"),
        "listing": [
            given._replace(
                labels=tuple(name.replace("dog", "wolf") for name in given.labels),
                difficult=tuple(name.replace("dog", "wolf") for name in given.difficult),
            )
            for given in VALID
        ],
    },
    "name": {"name": "beasts"},
    "crowds are members": {"difficult_is_member": True},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_the_content_changes_the_fingerprint(change: dict[str, Any], tmp_path: Path):
    assert write(tmp_path / "one").fingerprint != write(tmp_path / "other", **change).fingerprint


def test_where_the_data_came_from_is_not_part_of_its_content(tmp_path: Path):
    other = write(tmp_path / "other", source={"kind": "elsewhere"})
    assert write(tmp_path / "one").fingerprint == other.fingerprint
    assert other.source == {"kind": "elsewhere"}


@pytest.mark.parametrize(
    ("workers", "form"), [(1, "zip"), (2, "folder"), pytest.param(3, "zip", marks=pytest.mark.slow)]
)
def test_any_number_of_workers_and_any_order_of_the_source_give_the_same_bytes(workers: int, form: str, tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    one = ingest_coco(raw, tmp_path / "one", "animals", options=WriteOptions(shard_rows=2))
    for file in ("train", "val"):
        edit_json(
            raw / f"annotations/instances_{file}2014.json",
            lambda content: [content[table].reverse() for table in ("images", "annotations", "categories")],
        )
    source = raw if form == "folder" else zipped(raw, tmp_path / "raw.zip")
    many = ingest_coco(source, tmp_path / "many", "animals", options=WriteOptions(workers=workers, shard_rows=2))
    assert many.fingerprint == one.fingerprint
    of_one, of_many = contents(one.path), contents(many.path)
    assert of_one.pop("dataset.json") != of_many.pop("dataset.json")  # other bytes of the annotation files
    assert of_one == of_many
    assert len(of_one) == 1 + 5 + 2


def test_more_workers_than_shards_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(csc.data.ingest.workers, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("started"))
    assert write(tmp_path / "set", options=WriteOptions(workers=8)).splits["train"]["images"] == 3


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_try_makes_only_what_is_missing(workers: int, tmp_path: Path):
    options = WriteOptions(workers=workers, shard_rows=3)
    whole = write(tmp_path / "whole", LONG, options=options)
    first, second = Pictures(tmp_path / "1", {"07": RuntimeError("lost")}), Pictures(tmp_path / "2")
    with pytest.raises(RuntimeError, match="lost"):
        write(tmp_path / "set", LONG, first, options=options)
    assert not (tmp_path / "set" / "dataset.json").exists()
    finished = {path.stem for path in (tmp_path / "set" / "partial").glob("*.json")}
    assert {"00000", "00001"} <= finished < {"00000", "00001", "00002", "00003"}

    said = io.StringIO()
    again = write(tmp_path / "set", LONG, second, options=WriteOptions(workers, said, 3))
    assert contents(again.path) == contents(whole.path)
    assert second.read() == [row.image_id for index, row in enumerate(LONG) if f"{index // 3:05d}" not in finished]
    assert f"an earlier attempt has finished {len(finished)} of 4 shards" in said.getvalue()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "set", "1", "2"}


KILLED = """
import os, sys
from pathlib import Path
from csc.data.ingest.writer import WriteOptions
from tests.unit.test_writer import LONG, Pictures, write
os.environ["FIRST_PROCESS"] = str(os.getpid())
images = Pictures(fails={"07": None})
if __name__ == "__main__":
    write(Path(sys.argv[1]), LONG, images, options=WriteOptions(int(sys.argv[2]), shard_rows=3))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_process_leaves_no_workers_and_what_is_finished(workers: int, tmp_path: Path):
    whole = write(tmp_path / "whole", LONG, options=WriteOptions(shard_rows=3))
    command = [sys.executable, "-c", KILLED, str(tmp_path / "set"), str(workers)]
    killed = subprocess.run(command, capture_output=True, timeout=60)  # ends when no worker holds the pipe any more
    assert killed.returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "set"}
    assert not (tmp_path / "set" / "dataset.json").exists()
    images = Pictures(tmp_path / "log")
    again = write(tmp_path / "set", LONG, images, options=WriteOptions(shard_rows=3))
    assert contents(again.path) == contents(whole.path)
    assert images.read()
    kept = {row.image_id for row in LONG} - set(images.read())
    assert any({row.image_id for row in LONG[start : start + 3]} <= kept for start in range(0, len(LONG), 3))
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "set", "log"}


def fail_after_six(out: Path, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        write(out, LONG, Pictures(fails={"07": RuntimeError("lost")}), options=WriteOptions(shard_rows=3), **options)


OTHER_WORK: dict[str, dict[str, Any]] = {
    "state of the source": {"state": state_of("other")},
    "files": {"listing": [row._replace(file="elsewhere") for row in LONG]},
    "size of a shard": {"options": WriteOptions(shard_rows=2)},
}


@pytest.mark.parametrize("other", OTHER_WORK.values(), ids=OTHER_WORK)
def test_leftovers_of_other_images_are_dropped(other: dict[str, Any], tmp_path: Path):
    fail_after_six(tmp_path / "set", state=state_of("one"))
    images = Pictures(tmp_path / "log")
    given = {"listing": LONG, "state": state_of("one"), "options": WriteOptions(shard_rows=3)} | other
    dataset = write(tmp_path / "set", images=images, **given)
    assert images.read() == [row.image_id for row in given["listing"]]
    assert contents(dataset.path) == contents(write(tmp_path / "clean", **given).path)


SAME_IMAGES: dict[str, dict[str, Any]] = {
    "labels": {"listing": [row._replace(labels=CLASSES) for row in LONG]},
    "record of the source": {"source": {"kind": "other"}},
    "name": {"name": "beasts"},
    "further images": {"listing": [*LONG, ListedImage("99", "test", (), (), "")]},
}


@pytest.mark.parametrize("other", SAME_IMAGES.values(), ids=SAME_IMAGES)
def test_shards_of_the_same_images_are_taken_up_whatever_else_has_changed(other: dict[str, Any], tmp_path: Path):
    fail_after_six(tmp_path / "set", state=state_of("one"))
    images = Pictures(tmp_path / "log")
    given = {"listing": LONG, "state": state_of("one"), "options": WriteOptions(shard_rows=3)} | other
    dataset = write(tmp_path / "set", images=images, **given)
    assert images.read() == [row.image_id for row in given["listing"][6:]]
    assert contents(dataset.path) == contents(write(tmp_path / "clean", **given).path)


def test_without_a_state_the_record_of_the_source_stands_for_the_images(tmp_path: Path):
    fail_after_six(tmp_path / "set")
    images = Pictures(tmp_path / "log")
    write(tmp_path / "set", LONG, images, source={"kind": "other"}, options=WriteOptions(shard_rows=3))
    assert images.read() == [row.image_id for row in LONG]


def record_cut(begun: Path) -> None:
    (begun / "partial" / "00000.json").write_text("{")


def record_of_something_else(begun: Path) -> None:
    (begun / "partial" / "00000.json").write_text("{}")


def shard_cut(begun: Path) -> None:
    path = begun / "images" / "00000.arrow"
    path.write_bytes(path.read_bytes()[:-1])


def shard_with_a_flipped_byte(begun: Path) -> None:
    path = begun / "images" / "00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shard_lost(begun: Path) -> None:
    (begun / "images" / "00000.arrow").unlink()


@pytest.mark.parametrize(
    "spoil", [record_cut, record_of_something_else, shard_cut, shard_with_a_flipped_byte, shard_lost]
)
def test_a_damaged_leftover_is_made_again(spoil: Callable[[Path], None], tmp_path: Path):
    fail_after_six(tmp_path / "set")
    spoil(tmp_path / "set")
    images = Pictures(tmp_path / "log")
    dataset = write(tmp_path / "set", LONG, images, options=WriteOptions(shard_rows=3))
    assert images.read() == [row.image_id for row in (*LONG[:3], *LONG[6:])]
    assert contents(dataset.path) == contents(write(tmp_path / "clean", LONG, options=WriteOptions(shard_rows=3)).path)


def test_an_image_that_changes_between_two_tries_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = make_coco(tmp_path / "raw")
    check, calls = csc.data.ingest.images.checked_jpeg, collections.Counter[str]()

    def failing(content: bytes, where: str) -> Encoded:
        calls["all"] += 1
        if calls["all"] == 5:
            raise RuntimeError("lost")
        return check(content, where)

    monkeypatch.setattr(csc.data.ingest.images, "checked_jpeg", failing)
    with pytest.raises(RuntimeError, match="lost"):
        ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(shard_rows=2))
    (raw / "train2014" / "000000000003.jpeg").write_bytes(picture(99))
    again = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(shard_rows=2))
    assert contents(again.path) == contents(
        ingest_coco(raw, tmp_path / "x", "animals", options=WriteOptions(shard_rows=2)).path
    )


def test_a_full_disk_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_shard = csc.data.ingest.output.write_shard

    def full(path: Path, rows: Sequence[ListedImage], images: Any) -> Any:
        if rows[0].image_id == "06":
            raise OSError(28, "No space left on device")
        return write_shard(path, rows, images)

    monkeypatch.setattr(csc.data.ingest.output, "write_shard", full)
    message = refusal(lambda: write(tmp_path / "set", LONG, options=WriteOptions(shard_rows=3)), CscError)
    assert "No space left on device" in message
    assert "what is finished is kept" in message
    assert {path.name for path in (tmp_path / "set" / "partial").glob("*.json")} == {"00000.json", "00001.json"}


def test_a_lost_worker_is_reported_in_one_line_and_what_is_finished_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fail_after_six(tmp_path / "set")
    monkeypatch.setattr("csc.data.ingest.workers._work", lost_work)
    message = refusal(lambda: write(tmp_path / "set", LONG, options=WriteOptions(2, shard_rows=3)), CscError)
    assert "a worker process was lost" in message
    assert {path.name for path in (tmp_path / "set" / "partial").glob("*.json")} == {"00000.json", "00001.json"}


def lost_work(work: Any, part: Part) -> None:
    os._exit(1)


def test_several_who_make_the_same_data_set_at_once_all_get_it(tmp_path: Path):
    options = WriteOptions(shard_rows=3)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: write(tmp_path / "set", LONG, options=options), range(4)))
    assert len({dataset.fingerprint for dataset in made}) == 1
    assert contents(tmp_path / "set") == contents(write(tmp_path / "alone", LONG, options=options).path)
    assert {path.name for path in tmp_path.iterdir()} == {"set", "alone"}


def test_memory_holds_one_batch_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(csc.data.ingest.shard_writer, "BATCH_BYTES", 4 << 20)
    listing = [ListedImage(f"{row:02d}", "train" if row < 32 else "test", CLASSES, (), "") for row in range(64)]

    def large(rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        yield from (Encoded(bytes(1 << 20), 8, 8) for _ in rows)

    tracemalloc.start()
    dataset = write(tmp_path / "set", listing, large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20
    with pa.memory_map(f"{dataset.shards_uri}/00000.arrow") as source:
        assert pa.ipc.open_file(source).num_record_batches == 16


def sizes(dataset: Dataset) -> dict[str, tuple[int, int]]:
    """Width and height of every image: in the shard, after a look into the JPEG."""
    found = {}
    for row in shard_rows(dataset).values():
        with Image.open(io.BytesIO(row["jpeg"])) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert image.size == (row["width"], row["height"])
        found[row["image_id"]] = image.size
    return found


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_large_images_are_scaled_to_the_short_side_and_small_ones_kept(kind: str, tmp_path: Path):
    raw = make_coco(tmp_path / "raw", kind=kind)
    folder, suffix = raw / "train2014", kind.lower()
    (folder / f"000000000003.{suffix}").write_bytes(picture(1, 30, 90, kind))
    (folder / f"000000000013.{suffix}").write_bytes(picture(2, 400, 301, kind))
    (folder / f"000000000023.{suffix}").write_bytes(picture(3, 20, 500, kind))
    dataset = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(short_side=20))
    found = sizes(dataset)
    assert found["train-000000000003"] == (20, 60)
    assert found["train-000000000013"] == (27, 20)
    assert found["train-000000000023"] == (20, 500)
    assert found["test-000000000008"] == (27, 20)
    assert dataset.source["short_side"] == 20
    assert dataset.source["jpeg_quality"] == 90
    kept = next(row for row in shard_rows(dataset).values() if row["image_id"] == "train-000000000023")
    assert kind != "JPEG" or kept["jpeg"] == picture(3, 20, 500)


def test_a_scaled_image_shows_what_the_original_shows(tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    original = Image.linear_gradient("L").resize((600, 400)).convert("RGB")
    original.save(raw / "val2014" / "000000000008.jpeg", quality=95)
    dataset = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(short_side=100))
    row = next(row for row in shard_rows(dataset).values() if row["image_id"] == "test-000000000008")
    small, expected = Image.open(io.BytesIO(row["jpeg"])), original.resize((150, 100), Image.Resampling.BOX)
    difference = [abs(one - other) for one, other in zip(small.tobytes(), expected.tobytes(), strict=True)]
    assert max(difference) < 12


def test_scaled_sets_are_made_again_with_the_same_bytes_and_told_apart(tmp_path: Path):
    make_voc(tmp_path / "raw")
    small = ingest_voc2007(tmp_path / "raw", tmp_path / "small", options=WriteOptions(short_side=20))
    before = contents(small.path)
    assert ingest_voc2007(tmp_path / "raw", tmp_path / "small", options=WriteOptions(short_side=20)) == small
    again = ingest_voc2007(tmp_path / "raw", tmp_path / "again", options=WriteOptions(2, short_side=20))
    assert contents(again.path) == contents(small.path) == before
    assert ingest_voc2007(tmp_path / "raw", tmp_path / "large").fingerprint != small.fingerprint
    assert "another data set" in refusal(lambda: ingest_voc2007(tmp_path / "raw", tmp_path / "small"))


def test_progress_is_reported_only_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = io.StringIO()
    write(tmp_path / "quiet")
    write(tmp_path / "set", options=WriteOptions(progress=said))
    write(tmp_path / "set", options=WriteOptions(progress=said))
    assert capsys.readouterr().out == ""
    first, second = said.getvalue().splitlines()
    assert first.startswith("ingest · 5 images · ")
    assert second.startswith("compare with what is there · 5 images · ")


def objects(uri: str) -> dict[str, bytes]:
    return {name: read_bytes(f"{uri}/{name}") for name, _ in list_below(uri)}


def files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if content is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "source"), [(1, "folder"), (1, "prefix"), (1, "voc.zip"), (2, "prefix")])
def test_a_bucket_gets_the_same_files_as_a_folder_whatever_the_source(
    workers: int, source: str, bucket: str, tmp_path: Path
):
    make_voc(tmp_path / "folder")
    here = ingest_voc2007(tmp_path / "folder", tmp_path / "set", options=WriteOptions(shard_rows=3))
    if source == "prefix":
        for name, content in files(tmp_path / "folder").items():
            write_bytes(f"{bucket}/{source}/{name}", content)
    elif source == "voc.zip":
        upload(zipped(tmp_path / "folder", tmp_path / source), f"{bucket}/{source}")
    raw, options = (
        tmp_path / source if source == "folder" else f"{bucket}/{source}",
        WriteOptions(workers, shard_rows=3),
    )
    there = ingest_voc2007(raw, f"{bucket}/set", options=options)
    assert there.fingerprint == here.fingerprint
    assert objects(f"{bucket}/set") == files(here.path)
    assert ingest_voc2007(raw, f"{bucket}/set", options=options) == there


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_try_in_a_bucket_makes_only_what_is_missing(workers: int, bucket: str, tmp_path: Path):
    options, out = WriteOptions(workers, shard_rows=3), f"{bucket}/set"
    first, second = Pictures(tmp_path / "1", {"07": RuntimeError("lost")}), Pictures(tmp_path / "2")
    with pytest.raises(RuntimeError, match="lost"):
        write(out, LONG, first, options=options)
    begun = set(objects(out))
    assert {"partial/key", "partial/00000.json", "images/00000.arrow", "partial/00001.json"} <= begun
    assert not {"dataset.json", "labels.parquet", "partial/00002.json"} & begun
    assert "not a data set" in refusal(lambda: Dataset.open(out))
    write(out, LONG, second, options=options)
    assert not {row.image_id for row in LONG[:6]} & set(second.read())
    assert set(second.read()) >= {row.image_id for row in LONG[6:9]}
    assert objects(out) == files(write(tmp_path / "set", LONG, options=options).path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "raw.zip"])
def test_a_source_in_a_bucket_that_was_replaced_is_another_state(kind: str, bucket: str, tmp_path: Path):
    def state(content: bytes) -> str:
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / "a.jpeg").write_bytes(content)
        if kind == "prefix":
            upload(tmp_path / "raw" / "a.jpeg", f"{bucket}/{kind}/a.jpeg")
        else:
            upload(zipped(tmp_path / "raw", tmp_path / kind), f"{bucket}/{kind}")
        with Source(f"{bucket}/{kind}") as source:
            return SourceImages(source).state([ListedImage("a", "train", (), (), "a.jpeg")])

    first = state(b"of the same size")
    assert state(b"of the same SIZE") != first
    assert state(b"of the same size and more") != first
    assert state(b"of the same size") == first


@pytest.mark.slow
def test_a_bucket_keeps_what_is_not_ours_and_nothing_of_other_images(bucket: str, tmp_path: Path):
    out, options = f"{bucket}/set", WriteOptions(shard_rows=3)
    write_bytes(f"{out}/thesis.txt", b"the only copy")
    assert "not a data set" in refusal(lambda: write(out, LONG))
    assert objects(out) == {"thesis.txt": b"the only copy"}
    delete(f"{out}/thesis.txt")
    refusal(lambda: write(out, LONG, Pictures(fails={"01": BadData("01: broken image")}), options=options))
    assert objects(out) == {}
    bad = Pictures(fails={"07": BadData("07: broken image")})
    refusal(lambda: write(out, LONG, bad, state=state_of("one"), options=options))
    assert {"images/00001.arrow", "partial/00001.json"} <= set(objects(out))
    images = Pictures(tmp_path / "log")
    write(out, LONG, images, state=state_of("other"), options=options)
    assert images.read() == [row.image_id for row in LONG]
    assert objects(out) == files(write(tmp_path / "set", LONG, options=options).path)
    before = objects(out)
    assert "another data set" in refusal(lambda: write(out, LONG, name="beasts"))
    assert objects(out) == before


@pytest.mark.slow
def test_what_another_process_has_finished_meanwhile_is_never_dropped(bucket: str):
    write(f"{bucket}/set", LONG)
    before = objects(f"{bucket}/set")
    write_bytes(f"{bucket}/set/partial/key", b"of one who came late")
    Output(f"{bucket}/set", "of one who came late").drop()
    assert objects(f"{bucket}/set") == before


@dataclass(frozen=True)
class Interrupted:
    """Images in the midst of which something else happens."""

    at: str
    event: Callable[[], object]

    def __call__(self, rows: Sequence[ListedImage]) -> Iterator[Encoded]:
        for row in rows:
            if row.image_id == self.at:
                self.event()
            yield from PICTURES([row])


OTHERS = {
    "has begun": Pictures(fails={"04": RuntimeError("lost")}),
    "has finished": Pictures(jpegs={"00": picture(7, 8, 8)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("images", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("bad", [False, True], ids=["good data", "bad data"])
def test_other_work_that_takes_a_prefix_of_a_bucket_keeps_it(images: Pictures, bad: bool, bucket: str):
    out, options, there = f"{bucket}/set", WriteOptions(shard_rows=3), dict[str, bytes]()

    def another() -> None:
        with contextlib.suppress(RuntimeError):
            write(out, LONG, images, state=state_of("other"), options=options)
        there.update(objects(out))
        if bad:
            raise BadData("broken image")

    slower = Interrupted("07", another)
    message = refusal(lambda: write(out, LONG, slower, options=options), BadData if bad else CscError)
    assert "broken image" in message if bad else message.startswith(f"{out}: another ingest")
    assert there
    assert objects(out) == there


@pytest.mark.slow
def test_a_prefix_of_a_bucket_that_is_taken_before_the_card_gets_none(bucket: str, monkeypatch: pytest.MonkeyPatch):
    def taken(path: Path, uri: str) -> None:
        upload(path, uri)
        if uri.endswith("labels.parquet"):
            write_bytes(f"{out}/partial/key", b"of another")

    out = f"{bucket}/set"
    monkeypatch.setattr("csc.data.ingest.output.move_into", taken)
    assert refusal(lambda: write(out, LONG), CscError).startswith(f"{out}: another ingest")
    assert "dataset.json" not in objects(out)
    assert read_bytes(f"{out}/partial/key") == b"of another"


@pytest.mark.slow
def test_of_two_who_do_the_same_work_in_a_bucket_both_get_it(bucket: str):
    out, options, there = f"{bucket}/set", WriteOptions(shard_rows=3), dict[str, bytes]()

    def the_same() -> None:
        write(out, LONG, options=options)
        there.update(objects(out))

    dataset = write(out, LONG, Interrupted("07", the_same), options=options)
    assert dataset == Dataset.open(out)
    assert objects(out) == there


@pytest.mark.slow
def test_a_store_that_fails_midway_is_reported_in_one_line_and_the_work_is_taken_up(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(path: Path, uri: str) -> None:
        if uri.endswith("00002.arrow"):
            raise BadData(f"{uri}: the object store does not answer")
        upload(path, uri)

    out, options = f"{bucket}/set", WriteOptions(shard_rows=3)
    monkeypatch.setattr("csc.data.ingest.output.move_into", broken)
    message = refusal(lambda: write(out, LONG, options=options), CscError)
    assert "does not answer; what is finished is kept" in message
    monkeypatch.setattr("csc.data.ingest.output.move_into", upload)
    images = Pictures(tmp_path / "log")
    write(out, LONG, images, options=options)
    assert images.read() == [row.image_id for row in LONG[6:]]
