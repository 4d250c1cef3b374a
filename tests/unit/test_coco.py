import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from csc.data.dataset import Dataset
from csc.data.ingest.coco import COCO_CLASSES, ingest_coco, ingest_coco2014
from csc.data.published import differences
from csc.data.shards import ImageShards
from csc.errors import BadData
from tests.builders import COCO_CATEGORIES, add_annotation, contents, edit_json, make_coco, picture, zipped

TRAIN = "annotations/instances_train2014.json"
TEST = "annotations/instances_val2014.json"


def rows(dataset: Dataset) -> dict[str, dict[str, Any]]:
    return {row["image_id"]: row for row in dataset.labels().to_pylist()}


def without_annotations(image: int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["annotations"] = [item for item in content["annotations"] if item["image_id"] != image]

    return change


def test_ids_of_more_than_twelve_digits_are_sorted_too(tmp_path: Path):
    raw, numbers = make_coco(tmp_path / "raw"), {53: 10**12, 43: 10**12 - 1, 33: 5 * 10**12}

    def renumber(content: Any) -> None:
        for table, key in (("images", "id"), ("annotations", "image_id")):
            for item in content[table]:
                item[key] = numbers.get(item[key], item[key])

    edit_json(raw / "annotations/instances_train2014.json", renumber)
    dataset = ingest_coco(raw, tmp_path / "out", "animals")
    ids = dataset.labels()["image_id"].to_pylist()[:6]
    assert set(ids) == {f"train-{numbers.get(number, number):012d}" for number in range(3, 60, 10)}
    assert ids == sorted(ids)


def test_there_are_eighty_classes_in_alphabetical_order() -> None:
    assert len(COCO_CLASSES) == 80
    assert list(COCO_CLASSES) == sorted(set(COCO_CLASSES))
    assert (COCO_CLASSES[10], COCO_CLASSES[40], COCO_CLASSES[70]) == ("bird", "kite", "toilet")


def test_a_set_in_coco_format_becomes_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "out", "animals")
    assert dataset.name == "animals"
    assert dataset.classes == COCO_CATEGORIES
    assert dataset.difficult_is_member
    assert dataset.splits == {"train": {"images": 6, "labelled": 6}, "test": {"images": 4, "labelled": 4}}
    found = rows(dataset)
    assert list(found)[:2] == ["train-000000000003", "train-000000000013"]
    assert list(found)[-1] == "test-000000000038"
    assert found["train-000000000003"]["labels"] == ["zebra"]
    assert found["train-000000000033"]["labels"] == ["bird"]
    assert dataset.source["kind"] == "coco"
    assert set(dataset.source["files"]) == {"instances_train2014.json", "instances_val2014.json"}
    assert str(tmp_path) not in (dataset.path / "dataset.json").read_text()
    assert differences(dataset) == []
    assert capsys.readouterr().out == ""


def test_coco2014_has_the_eighty_classes_and_its_published_counts(tmp_path: Path) -> None:
    dataset = ingest_coco2014(make_coco(tmp_path / "raw", COCO_CLASSES), tmp_path / "out")
    assert dataset.name == "coco"
    assert dataset.classes == COCO_CLASSES
    assert dataset.source["kind"] == "coco2014"
    assert differences(dataset) == [
        "train: 6 images (published: 82,783)",
        "train: 6 labelled images (published: 82,081)",
        "test: 4 images (published: 40,504)",
        "test: 4 labelled images (published: 40,137)",
    ]


def test_a_class_present_as_a_crowd_only_is_no_label_but_membership(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")

    def crowd(content: Any) -> None:
        add_annotation(content, 3, "dog", crowd=1)
        add_annotation(content, 3, "zebra", crowd=1)
        without_annotations(13)(content)
        add_annotation(content, 13, "cat", crowd=1)
        add_annotation(content, 23, "dog")
        add_annotation(content, 43, "dog")

    edit_json(raw / TRAIN, crowd)
    dataset = ingest_coco(raw, tmp_path / "out", "animals")
    found = rows(dataset)
    assert (found["train-000000000003"]["labels"], found["train-000000000003"]["difficult"]) == (["zebra"], ["dog"])
    assert (found["train-000000000013"]["labels"], found["train-000000000013"]["difficult"]) == ([], ["cat"])
    assert dataset.splits["train"] == {"images": 6, "labelled": 5}
    assert dataset.difficult_is_member


def test_a_missing_iscrowd_means_an_ordinary_object(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    first = ingest_coco(raw, tmp_path / "out", "animals")
    edit_json(raw / TRAIN, lambda content: [item.pop("iscrowd") for item in content["annotations"]])
    assert ingest_coco(raw, tmp_path / "again", "animals").fingerprint == first.fingerprint


def test_an_image_without_annotations_is_kept_without_labels(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    edit_json(raw / TRAIN, without_annotations(53))
    dataset = ingest_coco(raw, tmp_path / "out", "animals")
    assert rows(dataset)["train-000000000053"]["labels"] == []
    assert dataset.splits["train"] == {"images": 6, "labelled": 5}


def test_both_files_may_count_their_images_from_one(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")

    def renumber(content: Any) -> None:
        numbers = {image["id"]: row for row, image in enumerate(content["images"], start=1)}
        for image in content["images"]:
            image["id"] = numbers[image["id"]]
        for item in content["annotations"]:
            item["image_id"] = numbers[item["image_id"]]

    edit_json(raw / TRAIN, renumber)
    edit_json(raw / TEST, renumber)
    found = rows(ingest_coco(raw, tmp_path / "out", "animals"))
    assert {"train-000000000001", "test-000000000001"} <= set(found)


@pytest.mark.parametrize("images", ["images", ".", None])
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("instances_train2017.json", "instances_val2017.json"),
        ("instances_train.json", "instances_test.json"),
        ("train.json", "val.json"),
        ("train.json", "test.json"),
    ],
)
def test_files_are_found_by_the_names_in_use(tmp_path: Path, train: str, test: str, images: str | None) -> None:
    raw = make_coco(tmp_path / "raw", train=train, test=test, images=images)
    (raw / "annotations/captions_train2014.json").write_text("not read")
    dataset = ingest_coco(raw, tmp_path / "out", "animals")
    assert set(dataset.source["files"]) == {train, test}
    assert dataset.splits["train"]["images"] == 6


def test_a_file_name_may_hold_folders(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw", images="images/deep")
    for file in (TRAIN, TEST):
        edit_json(raw / file, lambda content: [i.update(file_name=f"deep/{i['file_name']}") for i in content["images"]])
    assert ingest_coco(raw, tmp_path / "out", "animals").splits["test"]["images"] == 4


def test_a_zip_gives_the_same_bytes_as_its_folder(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw" / "animals")
    folder = ingest_coco(raw, tmp_path / "folder", "animals")
    archive = ingest_coco(zipped(raw, tmp_path / "coco.zip"), tmp_path / "archive", "animals")
    wrapped = ingest_coco(zipped(tmp_path / "raw", tmp_path / "wrapped.zip"), tmp_path / "wrapped", "animals")
    assert archive.fingerprint == folder.fingerprint == wrapped.fingerprint
    assert contents(archive.path) == contents(folder.path) == contents(wrapped.path)


def test_the_same_input_gives_the_same_bytes_and_may_be_ingested_again(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    first = ingest_coco(raw, tmp_path / "out", "animals")
    before = contents(first.path)
    again = ingest_coco(raw, tmp_path / "out", "animals")
    assert again.fingerprint == first.fingerprint
    assert contents(again.path) == before


def test_another_data_set_is_not_overwritten(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    before = contents(ingest_coco(raw, tmp_path / "out", "animals").path)
    with pytest.raises(BadData, match="another data set"):
        ingest_coco(raw, tmp_path / "out", "beasts")
    assert contents(tmp_path / "out") == before


def test_images_in_another_format_are_converted_to_jpeg(tmp_path: Path) -> None:
    dataset = ingest_coco(make_coco(tmp_path / "raw", kind="PNG"), tmp_path / "out", "animals")
    row = rows(dataset)["train-000000000003"]
    image = Image.open(io.BytesIO(ImageShards(dataset.shards_uri).jpeg(row["shard"], row["row"])))
    assert (image.format, image.size, image.mode) == ("JPEG", (48, 36), "RGB")


def test_jpeg_images_are_kept_byte_for_byte(tmp_path: Path) -> None:
    dataset = ingest_coco(make_coco(tmp_path / "raw"), tmp_path / "out", "animals")
    row = rows(dataset)["test-000000000008"]
    assert bytes(ImageShards(dataset.shards_uri).jpeg(row["shard"], row["row"])) == picture(8)


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_those_that_pycocotools_finds(seed: int, tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed").COCO
    raw, rng = make_coco(tmp_path / "raw"), random.Random(seed)

    def annotate(content: Any) -> None:
        for _ in range(30):
            image, category = rng.choice(content["images"])["id"], rng.choice(content["categories"])["name"]
            add_annotation(content, image, category, crowd=rng.random() < 0.5)
        for item in content["annotations"]:
            if not item["iscrowd"] and rng.random() < 0.5:
                item["iscrowd"] = False
        for table in ("images", "annotations", "categories"):
            rng.shuffle(content[table])

    for file in (TRAIN, TEST):
        edit_json(raw / file, annotate)
    found = rows(ingest_coco(raw, tmp_path / "out", "animals"))
    for file, split in ((TRAIN, "train"), (TEST, "test")):
        with contextlib.redirect_stdout(io.StringIO()):
            index = coco(raw / file)

        def names(image: int, crowd: bool) -> set[str]:
            items = index.loadAnns(index.getAnnIds(imgIds=[image], iscrowd=crowd))  # noqa: B023
            return {category["name"] for category in index.loadCats([item["category_id"] for item in items])}  # noqa: B023

        for image in index.getImgIds():
            row = found.pop(f"{split}-{image:012d}")
            ordinary, crowds = names(image, False), names(image, True)
            assert set(row["labels"]) == ordinary
            assert set(row["difficult"]) == crowds - ordinary
    assert not found


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    first = ingest_coco(raw, tmp_path / "out", "animals")
    (raw / TRAIN).write_bytes(b"\xef\xbb\xbf" + (raw / TRAIN).read_bytes())
    assert ingest_coco(raw, tmp_path / "again", "animals").fingerprint == first.fingerprint


def test_fields_that_are_not_read_may_hold_anything(tmp_path: Path) -> None:
    raw = make_coco(tmp_path / "raw")
    first = ingest_coco(raw, tmp_path / "out", "animals")

    def decorate(content: Any) -> None:
        content |= {"info": None, "licenses": {"id": "x"}}
        for table in ("images", "annotations", "categories"):
            for item in content[table]:
                item |= {"bbox": "none", "area": None, "segmentation": {"deep": [[{}]]}, "supercategory": 3}

    edit_json(raw / TRAIN, decorate)
    assert ingest_coco(raw, tmp_path / "again", "animals").fingerprint == first.fingerprint
