import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.images import checked_jpeg
from csc.data.shards import ImageShards
from csc.storage import sha256_file
from tests.builders import edit_json, picture
from tests.unit.test_writer import VALID, jpeg_of, refusal, write


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
    assert refusal(lambda: Dataset.open("gs://bucket/set")).startswith("gs://bucket/set: 'gs://' cannot be read")


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


def labels_other(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


@pytest.mark.parametrize("spoil", [labels_missing, labels_cut, labels_of_text, labels_of_numbers, labels_other])
def test_a_damaged_label_table_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path):
    dataset = write(tmp_path / "set")
    spoil(dataset.path / "labels.parquet")
    assert refusal(dataset.labels).startswith(f"{dataset.path / 'labels.parquet'}: n")  # not readable, or no such file


def shard_missing(path: Path) -> None:
    path.unlink()


def shard_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shard_of_something_else(path: Path) -> None:
    with pa.ipc.new_file(str(path), pa.schema([("x", pa.int32())])) as writer:
        writer.write(pa.record_batch({"x": pa.array([1], pa.int32())}))


def shard_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [shard_missing, shard_cut, shard_of_something_else, shard_flipped])
def test_a_damaged_image_shard_is_refused_by_name(spoil: Callable[[Path], None], tmp_path: Path):
    dataset = write(tmp_path / "set")
    spoil(Path(dataset.shards_uri) / "00000.arrow")
    message = refusal(lambda: ImageShards(dataset.shards_uri).jpeg(0, 0))
    assert message.startswith(f"{dataset.shards_uri}/00000.arrow: ")
    assert "run the same csc ingest again" in message


def test_a_shard_is_verified_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset, read = write(tmp_path / "set"), list[Path]()
    monkeypatch.setattr("csc.data.shards.sha256_file", lambda path: read.append(path) or sha256_file(path))
    for _ in range(3):
        assert bytes(ImageShards(dataset.shards_uri).jpeg(0, 1)) == jpeg_of(VALID[1])
    assert len(read) == 1


def test_opened_shards_go_to_a_worker_as_a_path_only(tmp_path: Path):
    dataset = write(tmp_path / "set")
    shards = ImageShards(dataset.shards_uri)
    assert bytes(shards.jpeg(0, 1)) == jpeg_of(VALID[1])
    packed = pickle.dumps(shards)
    assert len(packed) < 500
    assert not any(jpeg_of(given) in packed for given in VALID)
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).jpeg(0, 1))"
    worker = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    assert worker.stdout == jpeg_of(VALID[1])
    assert bytes(shards.jpeg(0, 4)) == jpeg_of(VALID[4])  # the original goes on working


def test_an_image_is_read_without_a_copy(tmp_path: Path):
    shards = ImageShards(write(tmp_path / "set").shards_uri)
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
def test_a_broken_image_is_refused_by_its_path(made: bytes):
    assert refusal(lambda: checked_jpeg(made, "some.zip/7.jpg")).startswith("some.zip/7.jpg: broken image (")


def test_a_jpeg_is_kept_byte_by_byte_and_another_format_becomes_one():
    jpeg, png = picture(1, 20, 10), picture(1, 20, 10, "PNG")
    assert checked_jpeg(jpeg, "x") == (jpeg, 20, 10)
    encoded, width, height = checked_jpeg(png, "x")
    assert (encoded[:3], width, height) == (b"\xff\xd8\xff", 20, 10)
