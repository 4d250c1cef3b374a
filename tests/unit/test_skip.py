"""Broken images can be left out, whatever the kind of source: the data set is that of a source without them."""

import io
import shutil
import zipfile
from pathlib import Path

import pytest

from csc import cli
from csc.data.dataset import Dataset
from csc.data.ingest.coco import COCO_CLASSES, ingest_coco
from csc.data.ingest.writer import WriteOptions
from csc.errors import BadData
from tests.builders import contents, edit_json, ingest_voc2007, make_coco, make_voc, picture, write_voc_xml, zipped

BROKEN = {"train": (13, 53), "val": (38,)}
IDS = ["train-000000000013", "train-000000000053", "test-000000000038"]


def break_images(raw: Path) -> None:
    for split, numbers in BROKEN.items():
        for number in numbers:
            path = raw / f"{split}2014/{number:012d}.jpeg"
            path.write_bytes(path.read_bytes()[:-200])


def never_listed(raw: Path) -> None:
    for split, numbers in BROKEN.items():
        edit_json(raw / f"annotations/instances_{split}2014.json", lambda content: forget(content, numbers))  # noqa: B023


def forget(content: dict[str, list[dict[str, int]]], numbers: tuple[int, ...]) -> None:
    content["images"] = [item for item in content["images"] if item["id"] not in numbers]
    content["annotations"] = [item for item in content["annotations"] if item["image_id"] not in numbers]


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_left_out_might_never_have_been_listed(
    workers: int, form: str, tmp_path: Path, request: pytest.FixtureRequest
):
    if form == "folder":  # an open zip is not for forks to share
        request.getfixturevalue("forked_workers")
    raw = make_coco(tmp_path / "raw", ("bird", "cat"))
    clean = shutil.copytree(raw, tmp_path / "without")
    never_listed(clean)
    break_images(raw)
    source = zipped(raw, tmp_path / "raw.zip") if form == "zip" else raw
    said = io.StringIO()
    dataset = ingest_coco(source, tmp_path / "set", "animals", options=WriteOptions(workers, said, 2, skip_bad=True))
    expected = ingest_coco(clean, tmp_path / "clean", "animals", options=WriteOptions(shard_rows=2))
    assert dataset.fingerprint == expected.fingerprint
    assert dataset.source["skipped"] == sorted(IDS)
    assert "skipped" not in expected.source
    of_one, of_other = contents(dataset.path), contents(expected.path)
    assert of_one.pop("dataset.json") != of_other.pop("dataset.json")
    assert of_one == of_other
    assert said.getvalue().count("left out: ") == 3
    assert "000000000013.jpeg: broken image (image file is truncated" in said.getvalue()
    assert (
        ingest_coco(source, tmp_path / "set", "animals", options=WriteOptions(workers, None, 2, skip_bad=True))
        == dataset
    )


def test_without_being_asked_nothing_is_left_out(tmp_path: Path):
    raw = make_coco(tmp_path / "raw", ("bird", "cat"))
    break_images(raw)
    with pytest.raises(BadData, match=r"000000000013\.jpeg: broken image .*--skip-bad"):
        ingest_coco(raw, tmp_path / "set", "animals")


def test_a_member_of_a_zip_with_a_wrong_checksum_is_a_broken_image(tmp_path: Path):
    archive = zipped(make_coco(tmp_path / "raw", ("bird", "cat")), tmp_path / "raw.zip")
    content = bytearray(archive.read_bytes())
    content[content.index(picture(13)) + 300] ^= 1
    archive.write_bytes(content)
    dataset = ingest_coco(archive, tmp_path / "set", "animals", options=WriteOptions(skip_bad=True))
    assert dataset.source["skipped"] == ["train-000000000013"]


def test_images_that_are_not_there_are_never_left_out(tmp_path: Path):
    raw = make_coco(tmp_path / "raw", ("bird", "cat"))
    (raw / "train2014/000000000013.jpeg").unlink()
    with pytest.raises(BadData, match=r"no file '000000000013\.jpeg'"):
        ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(skip_bad=True))


def test_of_voc_broken_images_and_unusable_annotations_are_left_out(tmp_path: Path):
    voc = make_voc(tmp_path)
    (voc / "JPEGImages/000007.jpg").write_text("no image")
    write_voc_xml(voc, "000008", [("no such class", False)])
    dataset = ingest_voc2007(voc, tmp_path / "out", options=WriteOptions(skip_bad=True))
    assert dataset.source["skipped"] == ["000007", "000008"]
    assert dataset.labels()["image_id"].to_pylist()[-2:] == ["000009", "000010"]


def test_after_the_file_is_replaced_only_its_shard_is_made(tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    bad = raw / "train2014/000000000033.jpeg"
    bad.write_text("no image")
    with pytest.raises(BadData, match="broken image"):
        ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(shard_rows=1))
    bad.write_bytes(picture(33))
    said = io.StringIO()
    dataset = ingest_coco(raw, tmp_path / "set", "animals", options=WriteOptions(1, said, 1))
    assert said.getvalue().startswith("an earlier attempt has finished 3 of 10 shards")
    clean = ingest_coco(raw, tmp_path / "clean", "animals", options=WriteOptions(shard_rows=1))
    assert contents(dataset.path) == contents(clean.path)


def test_a_zip_in_which_one_file_was_replaced_costs_one_shard(tmp_path: Path):
    raw = make_coco(tmp_path / "raw")
    bad = raw / "train2014/000000000033.jpeg"
    bad.write_text("no image")
    with pytest.raises(BadData, match="broken image"):
        ingest_coco(zipped(raw, tmp_path / "raw.zip"), tmp_path / "set", "animals", options=WriteOptions(shard_rows=1))
    bad.write_bytes(picture(33))
    said = io.StringIO()
    ingest_coco(zipped(raw, tmp_path / "raw.zip"), tmp_path / "set", "animals", options=WriteOptions(1, said, 1))
    assert said.getvalue().startswith("an earlier attempt has finished 3 of 10 shards")


def test_the_command_names_what_it_left_out_and_that_counts_are_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = make_coco(tmp_path / "raw", COCO_CLASSES)
    (raw / "val2014/000000000038.jpeg").write_text("no image")
    arguments = ["ingest", "coco2014", "--source", str(raw), "--out", str(tmp_path / "set"), "--workers", "1"]
    assert cli.main(arguments) == 2
    assert "--skip-bad" in capsys.readouterr().err
    assert cli.main([*arguments, "--skip-bad"]) == 0
    said = capsys.readouterr().out
    assert "note: left out 1 images that cannot be used: test-000000000038\n" in said
    assert "note: test: 3 images (published: 40,504)" in said
    assert Dataset.open(tmp_path / "set").splits["test"]["images"] == 3


def test_where_nothing_can_be_broken_the_flag_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["ingest", "digits", "--out", str(tmp_path / "set"), "--skip-bad"]) == 2
    assert "--skip-bad is not possible; scenes of digits are never broken" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_zips_side_by_side_are_one_source(tmp_path: Path):
    raw, downloads = make_coco(tmp_path / "raw"), tmp_path / "downloads"
    downloads.mkdir()
    for part in ("annotations", "train2014", "val2014"):
        with zipfile.ZipFile(downloads / f"{part}.zip", "w") as archive:
            for path in sorted((raw / part).iterdir()):
                archive.write(path, f"{part}/{path.name}")
    together = ingest_coco(downloads, tmp_path / "together", "animals", options=WriteOptions(2, shard_rows=4))
    apart = ingest_coco(raw, tmp_path / "apart", "animals", options=WriteOptions(shard_rows=4))
    assert contents(together.path) == contents(apart.path)
