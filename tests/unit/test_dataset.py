import dataclasses
import json
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from csc.data.dataset import Dataset, Example, ImageShards, checked_jpeg, write_dataset
from csc.errors import BadData
from tests.builders import contents, edit_json, picture

CLASSES = ("bird", "cat", "dog")
SOURCE = {"kind": "test"}


def example(image_id: str, split: str, *labels: str, difficult: tuple[str, ...] = ()) -> Example:
    return Example(image_id, split, labels, difficult, picture(sum(image_id.encode()), 8, 8), 8, 8)


VALID = (
    example("a", "train", "dog", "bird"),
    example("b", "train", "cat", difficult=("dog",)),
    example("c", "train"),
    example("d", "test", "cat"),
    example("e", "test", difficult=("bird",)),
)


def write(out: Path | str, examples: Iterable[Example] = VALID, **options: Any) -> Dataset:
    arguments: dict[str, Any] = {"name": "animals", "classes": CLASSES, "source": SOURCE} | options
    return write_dataset(out, examples=examples, **arguments)


def replaced(index: int, **values: Any) -> list[Example]:
    examples = list(VALID)
    examples[index] = dataclasses.replace(examples[index], **values)
    return examples


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def shard_rows(dataset: Dataset) -> dict[tuple[int, int], dict[str, Any]]:
    """Everything in the image shards, by place."""
    rows = {}
    for path in sorted(dataset.images.iterdir()):
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
        (given.image_id, given.jpeg, 8, 8) for given in VALID
    ]
    assert {path.name for path in dataset.path.iterdir()} == {"dataset.json", "labels.parquet", "images"}


def test_classes_are_sorted_whatever_their_order(tmp_path: Path):
    given, turned = write(tmp_path / "a"), write(tmp_path / "b", classes=CLASSES[::-1])
    assert turned.classes == CLASSES
    assert given.fingerprint == turned.fingerprint


def test_a_label_given_twice_counts_once_and_hides_the_difficult_one(tmp_path: Path):
    dataset = write(tmp_path / "set", replaced(0, labels=("dog", "dog", "bird"), difficult=("dog", "cat", "cat")))
    first = dataset.labels().to_pylist()[0]
    assert (first["labels"], first["difficult"]) == (["bird", "dog"], ["cat"])


def stolen(*_: object) -> Iterable[Example]:
    yield from VALID[:3]
    raise BadData("image d: cannot be read")


# What is handed over, and the words that the answer must have.
BAD: dict[str, tuple[Callable[[], Iterable[Example]], tuple[str, ...]]] = {
    "id twice": (lambda: [VALID[0], VALID[0], *VALID[1:]], ("image a", "twice")),
    "id in both splits": (lambda: [*VALID, example("a", "test", "cat")], ("image a", "twice")),
    "ids fall": (lambda: [VALID[1], VALID[0], *VALID[2:]], ("image a", "rising id")),
    "test first": (lambda: [*VALID[3:], *VALID[:3]], ("image a", "by split")),
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


@pytest.mark.parametrize(("examples", "words"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("there", [False, True], ids=["new", "in place of another"])
def test_bad_examples_are_refused_and_leave_nothing_behind(
    examples: Callable[[], Iterable[Example]], words: Sequence[str], there: bool, tmp_path: Path
):
    if there:
        write(tmp_path / "place" / "set")
    (tmp_path / "place").mkdir(exist_ok=True)
    before = contents(tmp_path)
    message = refusal(lambda: write(tmp_path / "place" / "set", examples()))
    for word in words:
        assert word in message
    assert contents(tmp_path) == before


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


def test_another_data_set_in_place_is_kept(tmp_path: Path):
    write(tmp_path / "set")
    before = contents(tmp_path)
    message = refusal(lambda: write(tmp_path / "set", replaced(0, labels=("dog", "bird", "cat"))))
    assert message.startswith(f"{tmp_path / 'set'}: already holds another data set")
    assert contents(tmp_path) == before


def test_the_same_data_set_may_be_written_again(tmp_path: Path):
    first = write(tmp_path / "set")
    before = contents(tmp_path)
    assert write(tmp_path / "set") == first
    assert contents(tmp_path) == before


@pytest.mark.parametrize("there", [False, True], ids=["empty", "same data set"])
@pytest.mark.parametrize("spelled", [".", "", "../set"])
def test_the_present_folder_is_filled_or_refused_but_never_spoilt(
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


@pytest.mark.parametrize("name", ["set", "~no-such-user/set", "s3://bucket/set"])
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
def test_a_full_shard_is_followed_by_another_and_places_are_right(
    per_shard: int, batch_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jpeg = picture(0, 8, 8)
    examples = [dataclasses.replace(given, jpeg=jpeg + given.image_id.encode()) for given in VALID]
    monkeypatch.setattr("csc.data.dataset.SHARD_BYTES", per_shard * (len(jpeg) + 1))
    monkeypatch.setattr("csc.data.dataset.BATCH_ROWS", batch_rows)
    dataset = write(tmp_path / "set", examples)
    places = [(row["shard"], row["row"]) for row in dataset.labels().to_pylist()]
    assert places == [divmod(index, per_shard) for index in range(5)]
    assert {place: row["image_id"] for place, row in shard_rows(dataset).items()} == dict(
        zip(places, "abcde", strict=True)
    )
    shards = ImageShards(dataset.images)
    assert [bytes(shards.jpeg(*place)) for place in places] == [given.jpeg for given in examples]


def test_the_fingerprint_does_not_depend_on_how_images_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one = write(tmp_path / "one")
    monkeypatch.setattr("csc.data.dataset.SHARD_BYTES", 1)
    many = write(tmp_path / "many")
    assert len(list(many.images.iterdir())) == 5
    assert one.fingerprint == many.fingerprint


def test_the_same_content_has_the_same_fingerprint_and_files(tmp_path: Path):
    one, other = (write(tmp_path / name) for name in ("one", "other"))
    assert one.fingerprint == other.fingerprint
    assert contents(one.path) == contents(other.path)


CHANGES: dict[str, dict[str, Any]] = {
    "pixel": {"examples": replaced(0, jpeg=picture(7, 8, 8))},
    "pixel of a test image": {"examples": replaced(4, jpeg=picture(7, 8, 8))},
    "label added": {"examples": replaced(0, labels=("dog", "bird", "cat"))},
    "label removed": {"examples": replaced(3, labels=())},
    "label becomes difficult": {"examples": replaced(3, labels=(), difficult=("cat",))},
    "difficult removed": {"examples": replaced(4, difficult=())},
    "id": {"examples": replaced(4, image_id="f")},
    "split": {"examples": replaced(2, split="test")},
    "image added": {"examples": [*VALID, example("f", "test", "cat")]},
    "image removed": {"examples": VALID[:4]},
    "class renamed": {
        "classes": ("bird", "cat", "wolf"),
        "examples": [
            dataclasses.replace(
                given,
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


@pytest.mark.parametrize("kind", ["missing", "empty folder", "file", "folder named dataset.json"])
def test_what_is_not_a_data_set_is_refused_with_the_remedy(kind: str, tmp_path: Path):
    path = tmp_path / "set"
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        (path / "dataset.json" if kind.endswith("json") else path).mkdir(parents=True)
    message = refusal(lambda: Dataset.open(path))
    assert message.startswith(f"{path}: not a data set")
    assert "csc ingest" in message


def test_a_data_set_elsewhere_is_refused_by_name():
    assert refusal(lambda: Dataset.open("s3://bucket/set")).startswith("s3://bucket/set: 's3://' is not a place")


def test_a_name_too_long_for_a_file_is_refused_in_one_line():
    assert "xxx" in refusal(lambda: Dataset.open("x" * 300))


@pytest.mark.parametrize(
    "made",
    ["", "{", "[]", "3", "null", "{}", '{"name": "voc"}', '{"classes": 3}'],
)
def test_a_dataset_json_of_something_else_is_refused_by_name(made: str, tmp_path: Path):
    (tmp_path / "dataset.json").write_text(made)
    assert refusal(lambda: Dataset.open(tmp_path)).startswith(f"{tmp_path / 'dataset.json'}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", 3),
        ("classes", None),
        ("classes", "abc"),
        ("classes", [1, 2]),
        ("splits", 3),
        ("splits", {}),
        ("fingerprint", None),
        ("source", None),
        ("unknown", 1),
    ],
)
def test_a_wrong_value_in_dataset_json_is_refused_by_name(key: str, value: Any, tmp_path: Path):
    write(tmp_path / "set")
    edit_json(tmp_path / "set" / "dataset.json", lambda info: info.update({key: value}))
    assert refusal(lambda: Dataset.open(tmp_path / "set")).startswith(f"{tmp_path / 'set' / 'dataset.json'}: ")


@pytest.mark.parametrize("key", ["name", "classes", "splits", "fingerprint", "source", "difficult_is_member"])
def test_a_missing_value_in_dataset_json_is_refused_by_name(key: str, tmp_path: Path):
    write(tmp_path / "set")
    edit_json(tmp_path / "set" / "dataset.json", lambda info: info.pop(key))
    message = refusal(lambda: Dataset.open(tmp_path / "set"))
    assert message.startswith(f"{tmp_path / 'set' / 'dataset.json'}: ")
    assert key in message


def labels_missing(path: Path) -> None:
    path.unlink()


def labels_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def labels_of_text(path: Path) -> None:
    pq.write_table(pa.table({"image_id": ["a"], "split": ["train"], "labels": ["dog"]}), path)


def labels_of_numbers(path: Path) -> None:
    pq.write_table(pa.table({"image_id": [1], "split": ["train"], "labels": [3]}), path)


@pytest.mark.parametrize("spoil", [labels_missing, labels_cut, labels_of_text, labels_of_numbers])
def test_a_spoilt_label_table_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path):
    dataset = write(tmp_path / "set")
    spoil(dataset.path / "labels.parquet")
    assert refusal(dataset.labels).startswith(f"{dataset.path / 'labels.parquet'}: not readable (")


def shard_missing(path: Path) -> None:
    path.unlink()


def shard_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shard_of_something_else(path: Path) -> None:
    with pa.ipc.new_file(str(path), pa.schema([("x", pa.int32())])) as writer:
        writer.write(pa.record_batch({"x": pa.array([1], pa.int32())}))


@pytest.mark.parametrize("spoil", [shard_missing, shard_cut, shard_of_something_else])
def test_a_spoilt_image_shard_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path):
    dataset = write(tmp_path / "set")
    spoil(dataset.images / "00000.arrow")
    message = refusal(lambda: ImageShards(dataset.images).jpeg(0, 0))
    assert message.startswith(f"{dataset.images / '00000.arrow'}: ")


def test_opened_shards_go_to_a_worker_as_a_path_only(tmp_path: Path):
    dataset = write(tmp_path / "set")
    shards = ImageShards(dataset.images)
    assert bytes(shards.jpeg(0, 1)) == VALID[1].jpeg
    packed = pickle.dumps(shards)
    assert len(packed) < 500
    assert not any(given.jpeg in packed for given in VALID)
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).jpeg(0, 1))"
    worker = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    assert worker.stdout == VALID[1].jpeg
    assert bytes(shards.jpeg(0, 4)) == VALID[4].jpeg  # the original goes on working


def test_an_image_is_read_without_a_copy(tmp_path: Path):
    shards = ImageShards(write(tmp_path / "set").images)
    before = pa.total_allocated_bytes()
    views = [shards.jpeg(0, row) for row in range(5)]
    assert pa.total_allocated_bytes() - before < sum(len(view) for view in views)


def enormous_png() -> bytes:
    """A few bytes that claim to be 20,000 pixels wide and high."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "made", [b"", b"no image", picture(0)[:200], enormous_png()], ids=["empty", "text", "cut", "bomb"]
)
def test_a_broken_image_is_refused_by_its_place(made: bytes):
    assert refusal(lambda: checked_jpeg(made, "some.zip/7.jpg")).startswith("some.zip/7.jpg: broken image (")


def test_a_jpeg_is_kept_byte_by_byte_and_another_format_becomes_one():
    jpeg, png = picture(1, 20, 10), picture(1, 20, 10, "PNG")
    assert checked_jpeg(jpeg, "x") == (jpeg, 20, 10)
    encoded, width, height = checked_jpeg(png, "x")
    assert (encoded[:3], width, height) == (b"\xff\xd8\xff", 20, 10)


def test_the_info_file_is_plain_json(tmp_path: Path):
    dataset = write(tmp_path / "set")
    assert json.loads((dataset.path / "dataset.json").read_text()) == {
        "name": "animals",
        "classes": ["bird", "cat", "dog"],
        "splits": dataset.splits,
        "fingerprint": dataset.fingerprint,
        "source": SOURCE,
        "difficult_is_member": False,
    }
