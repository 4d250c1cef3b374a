"""A finished data set whose files were lost or cut is made whole by the same ingest, or refused by the file."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.writer import WriteOptions
from csc.data.shards import ImageShards
from csc.errors import BadData
from tests.builders import contents, edit_json, make_coco


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spoil", [Path.unlink, cut, flip])
def test_damaged_shards_are_written_again_and_named(spoil: Callable[[Path], None], workers: int, tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    dataset = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(shard_rows=2))
    before = contents(dataset.path)
    for number in (1, 3):
        spoil(dataset.path / f"images/{number:05d}.arrow")
    assert contents(dataset.path) != before
    said = io.StringIO()
    assert ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(workers, said, 2)) == dataset
    assert contents(dataset.path) == before
    assert [line.rpartition("/")[2] for line in said.getvalue().splitlines()[1:]] == ["00001.arrow", "00003.arrow"]
    assert len(ImageShards(dataset.shards_uri).jpeg(1, 0)) > 0


@pytest.mark.parametrize("file", ["labels.parquet", "images/index.json"])
@pytest.mark.parametrize("spoil", [Path.unlink, cut])
def test_a_data_set_that_cannot_be_repaired_is_refused_by_the_file(
    spoil: Callable[[Path], None], file: str, tmp_path: Path
):
    raw = make_coco(tmp_path / "raw")
    dataset = ingest_coco(raw, tmp_path / "set", "animals")
    spoil(dataset.path / file)
    with pytest.raises(BadData, match=f"{file}: missing or damaged; remove {dataset.path} and ingest again"):
        ingest_coco(raw, tmp_path / "set", "animals")


@pytest.mark.parametrize("cause", ["sharded in another way", "made by other versions"])
def test_a_shard_that_would_have_other_bytes_is_left_as_it_is(cause: str, tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    dataset = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(shard_rows=4))
    cut(dataset.path / "images/00001.arrow")
    if cause == "made by other versions":
        edit_json(dataset.path / "images/index.json", lambda index: index[1].update(sha256="0" * 64))
    before = contents(dataset.path)
    options = WriteOptions(shard_rows=4 if cause == "made by other versions" else 3)
    with pytest.raises(BadData, match=r"00001\.arrow: missing or damaged; remove .* and ingest again"):
        ingest_coco(raw, tmp_path / "set", "animals", options=options)
    assert contents(dataset.path) == before
