"""Every bad input is refused in one line that says what is wrong and where, and leaves nothing behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from csc.data.ingest.coco import COCO_CLASSES, ingest_coco, ingest_coco2014
from csc.errors import BadData
from tests.builders import (
    add_annotation,
    contents,
    edit_json,
    ingest_voc2007,
    make_coco,
    make_voc,
    picture,
    write_voc_xml,
    zipped,
)

TRAIN = "annotations/instances_train2014.json"
TEST = "annotations/instances_val2014.json"
VOC = "VOCdevkit/VOC2007"
LISTS = f"{VOC}/ImageSets/Main"
Spoil = Callable[[Path, Path], None]


def write(name: str, content: bytes | str) -> Spoil:
    return lambda raw, out: _put(raw / name, content)


def _put(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Spoil:
    return lambda raw, out: (raw / name).unlink()


def cut(name: str, keep: float) -> Spoil:
    def spoil(raw: Path, out: Path) -> None:
        content = (raw / name).read_bytes()
        _put(raw / name, content[: int(len(content) * keep)])

    return spoil


def add_line(name: str, line: str) -> Spoil:
    return lambda raw, out: _put(raw / name, (raw / name).read_text() + line + "\n")


def objects(image_id: str, *pairs: tuple[str, bool]) -> Spoil:
    return lambda raw, out: write_voc_xml(raw / VOC, image_id, pairs)


def edit(name: str, change: Callable[[Any], None]) -> Spoil:
    return lambda raw, out: edit_json(raw / name, change)


def put(file: str, table: str, row: int, /, **values: Any) -> Spoil:
    return edit(file, lambda content: content[table][row].update(values))


def drop(name: str, table: str, row: int, key: str) -> Spoil:
    return edit(name, lambda content: content[table][row].pop(key))


def no_source(raw: Path, out: Path) -> None:
    shutil.rmtree(raw)


def other_layout(raw: Path, out: Path) -> None:
    (raw / VOC / "Annotations").rename(raw / VOC / "Labels")


def no_annotations_folder(raw: Path, out: Path) -> None:
    shutil.rmtree(raw / "annotations")


def broken_zip(raw: Path, out: Path) -> None:
    whole = zipped(raw, raw.with_suffix(".whole")).read_bytes()
    shutil.rmtree(raw)
    raw.with_suffix(".whole").unlink()
    raw.write_bytes(whole[: len(whole) // 2])


def zip_with_a_flipped_byte(raw: Path, out: Path) -> None:
    whole = bytearray(zipped(raw, raw.with_suffix(".whole")).read_bytes())
    whole[whole.index(picture(1)) + 100] ^= 1
    shutil.rmtree(raw)
    raw.with_suffix(".whole").unlink()
    raw.write_bytes(whole)


def source_is_another_file(raw: Path, out: Path) -> None:
    shutil.rmtree(raw)
    raw.write_text("a text file")


def image_is_a_dangling_link(raw: Path, out: Path) -> None:
    image = raw / VOC / "JPEGImages" / "000002.jpg"
    image.unlink()
    image.symlink_to("nowhere")


def out_not_empty(raw: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")


def out_is_a_file(raw: Path, out: Path) -> None:
    out.write_text("the only copy")


def out_below_a_file(raw: Path, out: Path) -> None:
    out.parent.rmdir()
    out.parent.write_text("a file where a folder is needed")


def out_holds_another_set(raw: Path, out: Path) -> None:
    ingest_coco(make_coco(out.parent / "other", ("apple", "pear")), out, "fruit")


def forget_class(raw: Path, out: Path) -> None:
    write_voc_xml(raw / VOC, "000001", [("car", False), ("horse", False), ("train", False), ("aeroplane", True)])


def category_of_no_image(raw: Path, out: Path) -> None:
    for name in (TRAIN, TEST):
        edit_json(raw / name, lambda content: content["categories"].append({"id": 99, "name": "yak"}))


def key_twice(raw: Path, out: Path) -> None:
    text = (raw / TRAIN).read_text()
    _put(raw / TRAIN, text.replace('"id": 53', '"id": "53", "id": 53', 1))


def beyond_all_bounds(raw: Path, out: Path) -> None:
    _put(raw / TRAIN, (raw / TRAIN).read_text().replace('"id": 53', '"id": 1e999', 1))


def wrong_and_cut(raw: Path, out: Path) -> None:
    put(TRAIN, "images", 0, id="53")(raw, out)
    cut(TRAIN, 0.9)(raw, out)


def images_still_packed(raw: Path, out: Path) -> None:
    for folder in ("train2014", "val2014"):
        zipped(raw / folder, raw / f"{folder}.zip")
        shutil.rmtree(raw / folder)


def all_in_one_tar(raw: Path, out: Path) -> None:
    shutil.make_archive(str(raw / "VOCtest_06-Nov-2007"), "tar", raw, "VOCdevkit")
    shutil.rmtree(raw / "VOCdevkit")


def bird_becomes_yak(content: Any) -> None:
    next(item for item in content["categories"] if item["name"] == "bird")["name"] = "yak"


def second_test_file(raw: Path, out: Path) -> None:
    shutil.copy(raw / TEST, raw / "annotations/test.json")


def another_year(raw: Path, out: Path) -> None:
    for name in (TRAIN, TEST):
        (raw / name).rename(raw / name.replace("2014", "2017"))


def zebra_only_as_crowd(content: Any) -> None:
    number = next(item["id"] for item in content["categories"] if item["name"] == "zebra")
    content["annotations"] = [item for item in content["annotations"] if item["category_id"] != number]
    add_annotation(content, content["images"][0]["id"], "zebra", crowd=1)


VOC_CASES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    ("missing folder", no_source, ("raw", "no such folder or zip")),
    ("not a VOC layout", other_layout, ("not a VOC 2007 layout", "Annotations")),
    (
        "missing trainval.txt",
        remove(f"{LISTS}/trainval.txt"),
        ("trainval.txt", "no such file", "one image id per line"),
    ),
    ("missing test.txt", remove(f"{LISTS}/test.txt"), ("test.txt", "no such file")),
    ("empty trainval.txt", write(f"{LISTS}/trainval.txt", "\n \n"), ("trainval.txt", "lists no image")),
    ("binary trainval.txt", write(f"{LISTS}/trainval.txt", b"\xff\xfe\x00"), ("trainval.txt", "not a text file")),
    ("list of a single class", add_line(f"{LISTS}/test.txt", "000011 -1"), ("test.txt, line 5", "'000011 -1'")),
    ("id that is a path", add_line(f"{LISTS}/test.txt", "../000001"), ("test.txt, line 5", "not an image id")),
    ("id without XML", remove(f"{VOC}/Annotations/000003.xml"), ("000003.xml", "no such file", "trainval.txt")),
    ("id without JPEG", remove(f"{VOC}/JPEGImages/000008.jpg"), ("000008.jpg", "no such file", "test.txt")),
    ("broken JPEG", write(f"{VOC}/JPEGImages/000002.jpg", "no image"), ("000002.jpg", "broken image")),
    ("truncated JPEG", cut(f"{VOC}/JPEGImages/000009.jpg", 0.7), ("000009.jpg", "broken image", "truncated")),
    ("zero-byte JPEG", write(f"{VOC}/JPEGImages/000002.jpg", b""), ("000002.jpg", "broken image")),
    ("JPEG that leads nowhere", image_is_a_dangling_link, ("000002.jpg", "no such file")),
    ("malformed XML", cut(f"{VOC}/Annotations/000004.xml", 0.5), ("000004.xml", "not readable as XML")),
    ("empty XML", write(f"{VOC}/Annotations/000004.xml", ""), ("000004.xml", "not readable as XML")),
    ("XML of something else", write(f"{VOC}/Annotations/000004.xml", "<html/>"), ("'html'", "<annotation>")),
    ("unknown class", objects("000005", ("zebra", False)), ("000005.xml", "object 1", "'zebra'", "known are")),
    ("unknown difficult class", objects("000005", ("zebra", True)), ("000005.xml", "object 1", "'zebra'")),
    ("object without name", objects("000010", ("dog", False), ("", False)), ("000010.xml", "object 2", "no name")),
    (
        "difficult is a word",
        write(
            f"{VOC}/Annotations/000010.xml",
            "<annotation><object><name>dog</name><difficult>yes</difficult></object></annotation>",
        ),
        ("000010.xml", "difficult = 'yes'", "0 or 1"),
    ),
    ("id twice", add_line(f"{LISTS}/trainval.txt", "000002"), ("trainval.txt, line 7", "'000002'", "line 2")),
    ("id in both lists", add_line(f"{LISTS}/test.txt", "000002"), ("test.txt", "'000002'", "trainval.txt")),
    ("empty class", forget_class, ("'aeroplane'", "no training image")),
    ("tar still packed", all_in_one_tar, ("not a VOC 2007 layout", "unpack VOCtest_06-Nov-2007.tar here first")),
    ("broken zip", broken_zip, ("raw", "not readable as a zip")),
    ("zip with a damaged image", zip_with_a_flipped_byte, ("000001.jpg", "CRC")),
    ("source is another file", source_is_another_file, ("raw", "not readable as a zip")),
    ("out folder not empty", out_not_empty, ("out", "not a data set")),
    ("out is a file", out_is_a_file, ("out", "not a data set")),
    ("out folder unwritable", out_below_a_file, ("cannot write", "out")),
    ("out holds another data set", out_holds_another_set, ("out", "another data set")),
]

COCO_CASES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    ("missing folder", no_source, ("raw", "no such folder or zip")),
    ("not a COCO layout", no_annotations_folder, ("not a COCO layout", "'annotations'")),
    ("no train annotations", remove(TRAIN), ("annotations", "no train annotations", "instances_train*.json")),
    ("no test annotations", remove(TEST), ("annotations", "no test annotations", "instances_val*.json")),
    ("two test files", second_test_file, ("instances_val2014.json, test.json", "keep one")),
    ("truncated JSON", cut(TRAIN, 0.5), (TRAIN, "not readable as JSON")),
    ("empty JSON", write(TRAIN, ""), (TRAIN, "not readable as JSON")),
    ("JSON that is a list", write(TEST, "[]"), (TEST, "expected object, got array", "images, annotations")),
    ("missing images", edit(TRAIN, lambda content: content.pop("images")), (TRAIN, "missing key 'images'")),
    (
        "missing annotations",
        edit(TEST, lambda content: content.pop("annotations")),
        (TEST, "missing key 'annotations'"),
    ),
    ("missing categories", edit(TRAIN, lambda content: content.pop("categories")), (TRAIN, "missing key 'categories'")),
    (
        "images is an object",
        edit(TRAIN, lambda content: content.update(images={})),
        (
            "expected array",
            "in images;",
        ),
    ),
    ("no images", edit(TEST, lambda content: content.update(images=[])), (TEST, "'images' is empty")),
    (
        "row that is a number",
        edit(TRAIN, lambda content: content["images"].append(7)),
        (
            "expected object",
            "in images[6];",
        ),
    ),
    ("annotation to unknown image", put(TRAIN, "annotations", 2, image_id=4), ("annotations[2]", "image_id 4")),
    ("annotation to unknown category", put(TEST, "annotations", 1, category_id=6), ("annotations[1]", "category_id 6")),
    (
        "annotation without image",
        drop(TRAIN, "annotations", 3, "image_id"),
        ("annotations[3]", "missing key 'image_id'"),
    ),
    ("annotation without category", drop(TRAIN, "annotations", 0, "category_id"), ("annotations[0]", "'category_id'")),
    ("annotation without id", drop(TRAIN, "annotations", 0, "id"), ("annotations[0]", "missing key 'id'")),
    (
        "image id in an annotation is a list",
        put(TRAIN, "annotations", 1, image_id=[3]),
        ("annotations[1].image_id",),
    ),
    (
        "iscrowd is a word",
        put(TRAIN, "annotations", 1, iscrowd="no"),
        ("annotations[1].iscrowd", "got str"),
    ),
    ("iscrowd is 2", put(TRAIN, "annotations", 1, iscrowd=2), ("annotations[1]", "iscrowd 2", "0 or 1")),
    ("iscrowd is null", put(TRAIN, "annotations", 1, iscrowd=None), ("annotations[1].iscrowd", "got null")),
    ("image id is a fraction", put(TRAIN, "images", 1, id=4.5), ("images[1].id", "expected int, got float")),
    ("image id is true", put(TRAIN, "images", 1, id=True), ("images[1].id", "expected int, got bool")),
    (
        "file_name is a number",
        put(TRAIN, "images", 1, file_name=7),
        ("images[1].file_name", "expected str"),
    ),
    ("category is null", put(TRAIN, "categories", 1, name=None), ("categories[1].name", "expected str, got null")),
    (
        "image row is null",
        edit(TRAIN, lambda content: content["images"].insert(0, None)),
        (
            "expected ",
            " in images[0];",
        ),
    ),
    (
        "annotations is a text",
        edit(TEST, lambda content: content.update(annotations="x")),
        (
            "expected ",
            " in annotations;",
        ),
    ),
    ("JSON that is a number", write(TEST, "3"), (TEST, "expected object, got int", "images, annotations")),
    ("JSON after JSON", add_line(TRAIN, "{}"), (TRAIN, "not readable as JSON")),
    ("JSON without end of depth", write(TRAIN, '{"x":' + "[" * 100_000), (TRAIN, "not readable as JSON")),
    ("JSON in another encoding", write(TRAIN, '{"images": []}'.encode("utf-16")), (TRAIN, "not readable as JSON")),
    ("duplicate image id", put(TRAIN, "images", 1, id=53), (TRAIN, "images[1]", "id 53", "images[0]")),
    ("image id is a text", put(TRAIN, "images", 1, id="43"), ("images[1].id", "expected int, got str")),
    ("negative image id", put(TRAIN, "images", 0, id=-1), ("images[0]", "-1")),
    ("duplicate category id", put(TRAIN, "categories", 1, id=5), ("categories[1]", "id 5", "categories[0]")),
    ("duplicate category name", put(TRAIN, "categories", 1, name="zebra"), ("categories[1]", "'zebra'", "keep one")),
    ("empty category name", put(TRAIN, "categories", 1, name=""), (TRAIN, "categories[1]", "name ''", "not empty")),
    ("category name of two lines", put(TRAIN, "categories", 1, name="a\nb"), ("categories[1]", r"'a\nb'")),
    ("image without file_name", drop(TRAIN, "images", 2, "file_name"), ("images[2]", "missing key 'file_name'")),
    ("empty file_name", put(TRAIN, "images", 2, file_name=""), ("images[2]", "file_name ''")),
    ("missing image file", remove("val2014/000000000018.jpeg"), (TEST, "image 18", "'000000000018.jpeg'", "val2014/")),
    ("key twice", key_twice, (TRAIN, "images[0].id", "expected int")),
    ("number beyond all bounds", beyond_all_bounds, (TRAIN, "images[0].id")),
    ("wrong entry in a cut file", wrong_and_cut, (TRAIN, "images[0].id", "got str")),
    ("no folder of images", images_still_packed, ("image 53", "put train2014/", "unpack train2014.zip, val2014.zip")),
    ("file_name leads out", put(TRAIN, "images", 0, file_name="../../out/x"), ("image 53", "'../../out/x'")),
    ("broken JPEG", write("train2014/000000000013.jpeg", "no image"), ("000000000013.jpeg", "broken image")),
    ("truncated JPEG", cut("val2014/000000000038.jpeg", 0.7), ("000000000038.jpeg", "broken image", "truncated")),
    ("categories differ", edit(TEST, bird_becomes_yak), (TEST, "missing: bird", "extra: yak", "instances_train2014")),
    ("empty class", category_of_no_image, ("'yak'", "no training image")),
    ("broken zip", broken_zip, ("raw", "not readable as a zip")),
    ("out folder not empty", out_not_empty, ("out", "not a data set")),
    ("out folder unwritable", out_below_a_file, ("cannot write", "out")),
    ("out holds another data set", out_holds_another_set, ("out", "another data set")),
]

COCO2014_CASES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    ("files of another year", another_year, ("instances_train2014.json", "no such")),
    ("no val annotations", remove(TEST), ("instances_val2014.json", "no such file", "test annotations")),
    ("other categories", edit(TRAIN, bird_becomes_yak), (TRAIN, "the 80 of COCO 2014", "missing: bird", "extra: yak")),
    (
        "crowd only in train",
        edit(TRAIN, zebra_only_as_crowd),
        ("'zebra'", "no training image"),
    ),
]


def table(cases: list[tuple[str, Spoil, tuple[str, ...]]]) -> pytest.MarkDecorator:
    assert len({name for name, _, _ in cases}) == len(cases)
    return pytest.mark.parametrize(("spoil", "words"), [pytest.param(*case, id=name) for name, *case in cases])


def refused(ingest: Callable[[Path, Path], object], tmp_path: Path, spoil: Spoil, words: tuple[str, ...]) -> None:
    """Spoil a set that is valid, ingest it, and look at the message and at what is left in all of the folder."""
    raw, out = tmp_path / "raw", tmp_path / "folder" / "out"
    out.parent.mkdir()
    spoil(raw, out)
    before = contents(tmp_path)
    with pytest.raises(BadData) as caught:
        ingest(raw, out)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for word in words:
        assert word in message
    assert contents(tmp_path) == before


@table(VOC_CASES)
def test_a_bad_voc_set_is_refused(tmp_path: Path, spoil: Spoil, words: tuple[str, ...]) -> None:
    make_voc(tmp_path / "raw")
    refused(ingest_voc2007, tmp_path, spoil, words)


@table(COCO_CASES)
def test_a_bad_coco_set_is_refused(tmp_path: Path, spoil: Spoil, words: tuple[str, ...]) -> None:
    make_coco(tmp_path / "raw")
    refused(lambda raw, out: ingest_coco(raw, out, "animals"), tmp_path, spoil, words)


@table(COCO2014_CASES)
def test_a_bad_coco2014_set_is_refused(tmp_path: Path, spoil: Spoil, words: tuple[str, ...]) -> None:
    make_coco(tmp_path / "raw", COCO_CLASSES)
    refused(ingest_coco2014, tmp_path, spoil, words)
