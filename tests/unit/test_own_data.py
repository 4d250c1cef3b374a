"""One's own data: exports of labelling tools, CSV files, class folders, and the order in which classes arrive."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from csc.cli import main
from csc.data.dataset import Dataset
from csc.data.ingest.class_folders import ingest_folder
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.csv_table import ingest_csv
from csc.data.ingest.images import split_by_name
from csc.data.ingest.source import Source
from csc.data.ingest.voc import VOC_CLASSES, ingest_voc
from csc.data.ingest.writer import WriteOptions
from csc.errors import BadData
from csc.scenario import Scenario
from tests.builders import COCO_CATEGORIES, VOC_TRAIN, edit_json, make_coco, make_voc, picture, write_voc_xml, zipped

TRAIN, TEST = "annotations/instances_train2014.json", "annotations/instances_val2014.json"


def labels(dataset: Dataset) -> dict[str, tuple[str, list[str]]]:
    """Split and labels by image id."""
    return {row["image_id"]: (row["split"], row["labels"]) for row in dataset.labels().to_pylist()}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(BadData) as caught:
        action()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def as_roboflow(raw: Path, test: str = "test") -> Path:
    """One folder for each split, the annotation file next to the images, and a category that groups the others."""
    for file, old, new in ((TRAIN, "train2014", "train"), (TEST, "val2014", test)):
        (raw / old).rename(raw / new)
        content = json.loads((raw / file).read_text())
        for category in content["categories"]:
            category["supercategory"] = "animals"
        content["categories"].insert(0, {"id": 0, "name": "animals", "supercategory": "none"})
        (raw / new / "_annotations.coco.json").write_text(json.dumps(content))
    shutil.rmtree(raw / "annotations")
    return raw


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize("test", ["test", "valid"])
def test_an_export_with_a_file_in_each_split_folder_is_the_same_data(test: str, form: str, tmp_path: Path):
    expected = ingest_coco(make_coco(tmp_path / "plain"), tmp_path / "expected", "animals")
    raw = as_roboflow(make_coco(tmp_path / "raw"), test)
    source = zipped(raw, tmp_path / "raw.zip") if form == "zip" else raw
    made = ingest_coco(source, tmp_path / "set", "animals")
    assert made.classes == COCO_CATEGORIES
    assert made.fingerprint == expected.fingerprint


def test_of_three_splits_one_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw = as_roboflow(make_coco(tmp_path / "raw"))
    shutil.copytree(raw / "test", raw / "valid")
    assert main(["ingest", "coco", "--source", str(raw), "--out", str(tmp_path / "set"), "--workers", "1"]) == 0
    assert "note: left out the split valid" in capsys.readouterr().out
    assert Dataset.open(tmp_path / "set").source["left_out"] == ["valid"]


def test_an_export_without_a_test_split_is_refused(tmp_path: Path):
    raw = as_roboflow(make_coco(tmp_path / "raw"))
    shutil.rmtree(raw / "test")
    assert "test/_annotations.coco.json: no such file" in refusal(lambda: ingest_coco(raw, tmp_path / "set", "animals"))


def test_the_files_of_a_set_may_lie_next_to_its_images(tmp_path: Path):
    expected = ingest_coco(make_coco(tmp_path / "plain"), tmp_path / "expected", "animals")
    raw = make_coco(tmp_path / "raw")
    for file in (TRAIN, TEST):
        (raw / file).rename(raw / Path(file).name)
    (raw / "annotations").rmdir()
    assert ingest_coco(raw, tmp_path / "set", "animals").fingerprint == expected.fingerprint


@pytest.mark.parametrize("file", ["annotations/instances_default.json", "result.json"])
def test_a_single_file_is_split_by_the_names_of_its_images(file: str, tmp_path: Path):
    images = [f"{number:03d}.jpg" for number in range(40)]
    content = {
        "categories": [{"id": 1, "name": "cat"}],
        "images": [{"id": number, "file_name": name} for number, name in enumerate(images)],
        "annotations": [{"id": number, "image_id": number, "category_id": 1} for number in range(40)],
    }
    (tmp_path / "raw" / "images").mkdir(parents=True)
    (tmp_path / "raw" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "raw" / file).write_text(json.dumps(content))
    for number, name in enumerate(images):
        (tmp_path / "raw" / "images" / name).write_bytes(picture(number, 8, 8))
    dataset = ingest_coco(tmp_path / "raw", tmp_path / "set", "cats")
    splits = [split for split, _ in labels(dataset).values()]
    assert sorted(splits) == sorted(map(split_by_name, images))
    assert 2 <= splits.count("test") <= 14
    assert "one image in 5" in dataset.source["split"]


def make_csv(folder: Path, text: str) -> Path:
    (folder / "photos").mkdir(parents=True)
    for number in range(4):
        (folder / "photos" / f"{number}.jpg").write_bytes(picture(number, 8, 8))
    (folder / "labels.csv").write_text(text)
    return folder


CSV = """image,labels,split
photos/0.jpg,cat; dog,train
photos/1.jpg,dog,train

"photos/2.jpg","cat",test
photos/3.jpg,,test
"""


def test_a_csv_file_lists_images_with_their_labels(tmp_path: Path):
    dataset = ingest_csv(make_csv(tmp_path / "raw", CSV), tmp_path / "set", "pets")
    assert dataset.classes == ("cat", "dog")
    assert labels(dataset) == {
        "photos/0.jpg": ("train", ["cat", "dog"]),
        "photos/1.jpg": ("train", ["dog"]),
        "photos/2.jpg": ("test", ["cat"]),
        "photos/3.jpg": ("test", []),
    }


BAD_CSV = {
    "no header": (CSV.partition("\n")[2], "the first line is 'photos/0.jpg,cat; dog,train'"),
    "empty": ("", "the first line is ''"),
    "too few cells": (CSV + "photos/3.jpg\n", "row 7: 1 cells; expected 3 (image,labels,split)"),
    "twice": (CSV + "photos/0.jpg,cat,train\n", "row 7: image 'photos/0.jpg' is listed twice"),
    "no such image": (CSV + "photos/9.jpg,cat,train\n", "row 7: no file 'photos/9.jpg'"),
    "outside": (CSV + "../labels.csv,cat,train\n", "row 7: no file '../labels.csv'"),
    "another split": (CSV + "photos/3.jpg,cat,val\n", "photos/3.jpg' is listed twice"),
    "unknown split": (CSV.replace(",test", ",val"), "row 5: split is 'val'; expected train or test"),
    "quote not closed": (CSV + '"photos', "not readable as CSV"),
}


@pytest.mark.parametrize(("text", "words"), BAD_CSV.values(), ids=BAD_CSV)
def test_a_bad_csv_file_is_refused_by_the_row(text: str, words: str, tmp_path: Path):
    raw = make_csv(tmp_path / "raw", text)
    assert words in refusal(lambda: ingest_csv(raw, tmp_path / "set", "pets"))
    assert not (tmp_path / "set").exists()


def make_folders(root: Path, *folders: str) -> Path:
    for folder in folders:
        for number in range(12):
            file = root / folder / f"{number:02d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(number, 8, 8))
        (root / folder / "Thumbs.db").write_text("no image")
    return root


@pytest.mark.parametrize("top", ["", "pets"])
def test_a_folder_of_images_is_a_class(top: str, tmp_path: Path):
    folders = [f"{top}/{split}/{name}".strip("/") for split in ("train", "val") for name in ("cat", "dog")]
    raw = make_folders(tmp_path / "raw", *folders)
    dataset = ingest_folder(raw, tmp_path / "set", "pets")
    assert dataset.classes == ("cat", "dog")
    assert dataset.splits["train"]["images"] == dataset.splits["test"]["images"] == 24
    first = next(iter(labels(dataset).items()))
    assert first == (f"{top}/train/cat/00.jpg".strip("/"), ("train", ["cat"]))


def test_class_folders_without_splits_are_split_by_name(tmp_path: Path):
    raw = make_folders(tmp_path / "raw", "cat", "dog")
    dataset = ingest_folder(raw, tmp_path / "set", "pets")
    expected = {
        (f"{label}/{n:02d}.jpg", split_by_name(f"{label}/{n:02d}.jpg")) for label in ("cat", "dog") for n in range(12)
    }
    assert {(image_id, split) for image_id, (split, _) in labels(dataset).items()} == expected


@pytest.mark.parametrize(
    ("folders", "words"), [(["train/cat"], "test: no such folder"), ([], "no images in class folders")]
)
def test_folders_that_are_no_classes_are_refused(folders: list[str], words: str, tmp_path: Path):
    (tmp_path / "raw").mkdir()
    raw = make_folders(tmp_path / "raw", *folders)
    assert words in refusal(lambda: ingest_folder(raw, tmp_path / "set", "pets"))


def test_classes_arrive_in_the_order_that_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    raw, order = make_coco(tmp_path / "raw"), tmp_path / "order.txt"
    order.write_text("zebra\ndog\n\ncat\nbird\n")
    plain = ingest_coco(raw, tmp_path / "plain", "animals")
    command = ["ingest", "coco", "--source", str(raw), "--out", str(tmp_path / "set"), "--name", "animals"]
    assert main([*command, "--class-order", str(order), "--workers", "1"]) == 0
    assert f"class order (from {order}): zebra, dog, cat, bird" in capsys.readouterr().out
    dataset = Dataset.open(tmp_path / "set")
    assert dataset.classes == ("zebra", "dog", "cat", "bird")
    assert dataset.fingerprint != plain.fingerprint  # a cache never mixes the two
    assert Scenario.parse("animals-b0c2").task(dataset.classes, 1).new == ("zebra", "dog")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (["bird", "cat", "dog"], "lacks: zebra"),
        (["bird", "cat", "dog", "yak", "zebra"], "unknown classes: yak"),
        (["bird", "cat", "cat", "dog", "zebra"], "twice: cat"),
    ],
)
def test_an_order_of_other_classes_is_refused(order: list[str], words: str, tmp_path: Path):
    raw, options = make_coco(tmp_path / "raw"), WriteOptions(class_order=order)
    assert words in refusal(lambda: ingest_coco(raw, tmp_path / "set", "animals", options))
    assert not (tmp_path / "set").exists()


def test_a_second_reading_by_pycocotools_agrees_or_names_the_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    raw = make_coco(tmp_path / "raw")
    edit_json(raw / TRAIN, lambda content: content["annotations"][0].update(iscrowd=1))
    command = ["ingest", "coco", "--source", str(raw), "--out", str(tmp_path / "set"), "--workers", "1", "--verify"]
    assert main(command) == 0
    assert "verified with pycocotools: 10 images, 9 labels, 10 memberships" in capsys.readouterr().out

    from csc.data.ingest.verify import verify_coco

    monkeypatch.setattr(Source.read, "__defaults__", (10,))  # bytes of an image; a table has many more
    edit_json(raw / TRAIN, lambda content: content["annotations"][0].update(iscrowd=0))
    message = refusal(lambda: verify_coco(Dataset.open(tmp_path / "set"), raw))
    assert "labels differ, first in image train-000000000003" in message
    assert "only read by pycocotools" in message


def as_year(voc: Path, year: str) -> Path:
    """Rename VOC2007; as in 2012, the test images have no annotations and there is a list val.txt."""
    lists = voc / "ImageSets" / "Main"
    (lists / "trainval.txt").rename(lists / "train.txt")
    (lists / "test.txt").rename(lists / "val.txt")
    (lists / "test.txt").write_text("2012_000001\n")
    return voc.rename(voc.with_name(f"VOC{year}"))


def test_of_voc_2012_val_is_the_test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    as_year(make_voc(tmp_path / "raw"), "2012")
    command = ["ingest", "voc2012", "--source", str(tmp_path / "raw"), "--out", str(tmp_path / "set"), "--workers", "1"]
    assert main(command) == 0
    dataset = Dataset.open(tmp_path / "set")
    assert (dataset.name, dataset.source["kind"], dataset.classes) == ("voc2012", "voc2012", VOC_CLASSES)
    assert list(dataset.source["files"]) == ["train.txt", "val.txt"]
    assert dataset.splits["train"]["images"] == 6
    assert "note: train: 6 images (published: 5,717)" in capsys.readouterr().out


def test_any_set_in_the_layout_of_voc_brings_its_own_classes(tmp_path: Path):
    voc = as_year(make_voc(tmp_path / "raw"), "2031")
    objects = [(name, False) for name in (*VOC_CLASSES, "submarine")]
    write_voc_xml(voc, VOC_TRAIN[0], objects)
    dataset = ingest_voc(tmp_path / "raw", tmp_path / "set", "ships")
    assert "submarine" in dataset.classes
    assert dataset.source["kind"] == "voc2031"


def test_of_two_years_one_must_be_chosen(tmp_path: Path):
    voc = make_voc(tmp_path / "raw")
    shutil.copytree(voc, voc.with_name("VOC2012"))
    message = refusal(lambda: ingest_voc(tmp_path / "raw", tmp_path / "set", "both"))
    assert "several years (VOC2007, VOC2012)" in message
    assert ingest_voc(tmp_path / "raw", tmp_path / "set", "voc", "2007").splits["train"]["images"] == 6
