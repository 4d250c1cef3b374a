import io
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from csc.data.dataset import Dataset
from csc.data.ingest.source import Source
from csc.data.ingest.voc import VOC_CLASSES
from csc.data.ingest.writer import WriteOptions
from csc.data.published import differences, published_counts
from csc.data.shards import ImageShards
from csc.errors import BadData
from tests.builders import VOC_TEST, VOC_TRAIN, contents, ingest_voc2007, make_voc, picture, write_voc_xml, zipped


def rows(dataset: Dataset) -> dict[str, dict[str, object]]:
    return {row["image_id"]: row for row in dataset.labels().to_pylist()}


def test_there_are_twenty_classes_in_alphabetical_order() -> None:
    assert len(VOC_CLASSES) == 20
    assert list(VOC_CLASSES) == sorted(set(VOC_CLASSES))


def test_trainval_becomes_train_and_test_becomes_test(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    dataset = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    assert dataset.name == "voc"
    assert dataset.classes == VOC_CLASSES
    assert not dataset.difficult_is_member
    assert dataset.splits == {"train": {"images": 6, "labelled": 6}, "test": {"images": 4, "labelled": 4}}
    found = rows(dataset)
    assert [image_id for image_id, row in found.items() if row["split"] == "train"] == list(VOC_TRAIN)
    assert [image_id for image_id, row in found.items() if row["split"] == "test"] == list(VOC_TEST)
    assert found["000001"]["labels"] == ["aeroplane", "car", "horse", "train"]
    assert found["000001"]["difficult"] == []


def test_images_are_kept_byte_for_byte_with_the_size_of_the_jpeg(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    dataset = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    row = rows(dataset)["000008"]
    jpeg = bytes(ImageShards(dataset.shards_uri).jpeg(row["shard"], row["row"]))
    assert jpeg == picture(8)
    assert Image.open(io.BytesIO(jpeg)).size == (48, 36)
    shard = pa.ipc.open_file(str(dataset.path / "images" / "00000.arrow")).read_all()
    assert set(shard["width"].to_pylist()) == {48}
    assert set(shard["height"].to_pylist()) == {36}


def test_a_class_with_difficult_objects_only_is_set_apart(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw", difficult={"000001": ["dog", "car", "dog"]})
    row = rows(ingest_voc2007(tmp_path / "raw", tmp_path / "out"))["000001"]
    assert row["labels"] == ["aeroplane", "car", "horse", "train"]
    assert row["difficult"] == ["dog"]


def test_an_image_without_ordinary_objects_is_kept_without_labels(tmp_path: Path) -> None:
    voc = make_voc(tmp_path / "raw")
    write_voc_xml(voc, "000007", [("person", True)])
    write_voc_xml(voc, "000008", [])
    dataset = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    assert dataset.splits["test"] == {"images": 4, "labelled": 2}
    assert rows(dataset)["000007"]["difficult"] == ["person"]
    assert rows(dataset)["000008"]["labels"] == rows(dataset)["000008"]["difficult"] == []


def test_a_missing_difficult_flag_means_ordinary(tmp_path: Path) -> None:
    voc = make_voc(tmp_path / "raw")
    (voc / "Annotations/000007.xml").write_text("<annotation><object><name> dog </name></object></annotation>")
    assert rows(ingest_voc2007(tmp_path / "raw", tmp_path / "out"))["000007"]["labels"] == ["dog"]


@pytest.mark.parametrize("inside", ["", "VOCdevkit", "VOCdevkit/VOC2007"])
def test_the_source_may_be_the_set_or_a_folder_around_it(tmp_path: Path, inside: str) -> None:
    make_voc(tmp_path / "raw" / "download")
    whole = ingest_voc2007(tmp_path / "raw", tmp_path / "whole")
    part = ingest_voc2007(tmp_path / "raw" / "download" / inside, tmp_path / "part")
    assert part.fingerprint == whole.fingerprint


@pytest.mark.parametrize("inside", ["", "download", "download/VOCdevkit", "download/VOCdevkit/VOC2007"])
def test_a_zip_gives_the_same_bytes_as_its_folder(tmp_path: Path, inside: str) -> None:
    make_voc(tmp_path / "raw" / "download", difficult={"000002": ["dog"]})
    folder = ingest_voc2007(tmp_path / "raw", tmp_path / "folder")
    archive = ingest_voc2007(zipped(tmp_path / "raw" / inside, tmp_path / "voc.zip"), tmp_path / "archive")
    assert archive.fingerprint == folder.fingerprint
    assert contents(archive.path) == contents(folder.path)


def test_the_same_input_gives_the_same_bytes_and_may_be_ingested_again(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    first = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    before = contents(first.path)
    again = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    assert again.fingerprint == first.fingerprint
    assert contents(again.path) == before
    other = ingest_voc2007(tmp_path / "raw", tmp_path / "other")
    assert contents(other.path) == before


def test_the_order_of_the_lists_does_not_matter(tmp_path: Path) -> None:
    voc = make_voc(tmp_path / "raw")
    first = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    (voc / "ImageSets/Main/trainval.txt").write_bytes(
        b"\r\n".join(i.encode() for i in reversed(VOC_TRAIN)) + b"\r\n\r\n"
    )
    assert ingest_voc2007(tmp_path / "raw", tmp_path / "again").fingerprint == first.fingerprint


def test_images_that_no_list_names_are_left_out(tmp_path: Path) -> None:
    voc = make_voc(tmp_path / "raw")
    first = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    (voc / "JPEGImages/999999.jpg").write_bytes(b"not read")
    (voc / "Annotations/999999.xml").write_bytes(b"not read")
    assert ingest_voc2007(tmp_path / "raw", tmp_path / "again").fingerprint == first.fingerprint


def test_another_data_set_is_not_overwritten(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    make_voc(tmp_path / "changed", difficult={"000001": ["dog"]})
    first = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    before = contents(first.path)
    with pytest.raises(BadData, match="another data set"):
        ingest_voc2007(tmp_path / "changed", tmp_path / "out")
    assert contents(first.path) == before


def test_the_record_of_the_source_names_files_and_no_folder(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    dataset = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    assert dataset.source["kind"] == "voc2007"
    assert set(dataset.source["files"]) == {"trainval.txt", "test.txt"}
    assert all(len(value) == 64 for value in dataset.source["files"].values())
    assert str(tmp_path) not in (dataset.path / "dataset.json").read_text()


def test_a_part_of_the_benchmark_is_told_apart_by_its_counts(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    dataset = ingest_voc2007(tmp_path / "raw", tmp_path / "out")
    assert differences(dataset) == [
        "train: 6 images (published: 5,011)",
        "test: 4 images (published: 4,952)",
    ]
    assert published_counts("") == {}


def test_a_source_never_reads_outside_itself(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    with Source(tmp_path / "inside") as files:
        assert files.read("./file") == b"inside"
        for name in ("../secret", str(tmp_path / "secret"), "nowhere/../../secret"):
            assert not files.has(name)
            with pytest.raises(BadData, match="no such file"):
                files.read(name)


def test_a_source_lists_a_zip_as_it_lists_its_folder(tmp_path: Path) -> None:
    make_voc(tmp_path / "raw")
    shutil.copytree(tmp_path / "raw", tmp_path / "raw/__MACOSX")
    with Source(tmp_path / "raw") as folder, Source(zipped(tmp_path / "raw", tmp_path / "voc.zip")) as archive:
        for name in ("", "VOCdevkit", "VOCdevkit/VOC2007", "VOCdevkit/VOC2007/Annotations", "nowhere"):
            assert folder.names(name) == archive.names(name)
            assert folder.folders(name) == archive.folders(name)
        assert folder.folders() == {"VOCdevkit"}


def test_images_with_unusable_annotations_can_be_left_out_and_are_named(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    write_voc_xml(voc, "000008", [("no such class", False)])
    with pytest.raises(BadData, match="000008"):
        ingest_voc2007(voc, tmp_path / "refused")
    dataset = ingest_voc2007(voc, tmp_path / "out", options=WriteOptions(skip_bad=True))
    assert dataset.source["skipped"] == ["000008"]
    assert "000008" not in dataset.labels()["image_id"].to_pylist()
    assert dataset.splits["test"]["images"] == 3
