"""Small valid data sets in the layouts that the readers know, for tests to ingest or to break."""

import hashlib
import io
import json
import random
import shutil
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from csc.data.dataset import Dataset, card_digest
from csc.data.ingest.voc import VOC_CLASSES, ingest_voc
from csc.data.ingest.writer import DEFAULTS, WriteOptions

VOC_TRAIN = tuple(f"{number:06d}" for number in range(1, 7))
VOC_TEST = tuple(f"{number:06d}" for number in range(7, 11))
COCO_CATEGORIES = ("bird", "cat", "dog", "zebra")


def picture(seed: int, width: int = 48, height: int = 36, kind: str = "JPEG") -> bytes:
    """Encode a noisy image that is the same for the same seed; noise makes it long enough to be cut."""
    pixels = random.Random(seed).randbytes(width * height * 3)
    encoded = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(encoded, kind)
    return encoded.getvalue()


def ingest_voc2007(source: str | Path, out: str | Path, options: WriteOptions = DEFAULTS) -> Dataset:
    """Ingest it as `csc ingest voc2007` does."""
    return ingest_voc(source, out, "voc", "2007", options)


def make_voc(folder: Path, difficult: Mapping[str, Iterable[str]] | None = None) -> Path:
    """Make `folder/VOCdevkit/VOC2007` with 6 train and 4 test images; return VOC2007.

    All 20 classes are in train, three or four to an image. The sizes in the XML are not those of the images, as in a
    set that was scaled down.

    Args:
        folder: where VOCdevkit is made.
        difficult: further objects by image id, flagged as difficult.
    """
    voc = folder / "VOCdevkit" / "VOC2007"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (voc / name).mkdir(parents=True)
    for name, ids in (("trainval.txt", VOC_TRAIN), ("test.txt", VOC_TEST)):
        (voc / "ImageSets/Main" / name).write_text("".join(f"{image_id}\n" for image_id in ids))
        for index, image_id in enumerate(ids):
            classes = [(label, False) for label in VOC_CLASSES[index :: len(ids)]]
            classes += [(label, True) for label in (difficult or {}).get(image_id, ())]
            write_voc_xml(voc, image_id, classes)
            (voc / "JPEGImages" / f"{image_id}.jpg").write_bytes(picture(int(image_id)))
    return voc


def write_voc_xml(voc: Path, image_id: str, objects: Iterable[tuple[str, bool]]) -> None:
    """Write the annotation of one image: pairs of class and difficult."""
    annotation = ET.Element("annotation")
    ET.SubElement(annotation, "filename").text = f"{image_id}.jpg"
    size = ET.SubElement(annotation, "size")
    for name, value in (("width", "500"), ("height", "375"), ("depth", "3")):
        ET.SubElement(size, name).text = value
    for label, difficult in objects:
        thing = ET.SubElement(annotation, "object")
        ET.SubElement(thing, "name").text = label
        ET.SubElement(thing, "difficult").text = str(int(difficult))
        part = ET.SubElement(thing, "part")  # a part has a name too, which is not a class
        ET.SubElement(part, "name").text = "head"
    ET.ElementTree(annotation).write(voc / "Annotations" / f"{image_id}.xml")


def make_coco(
    folder: Path,
    categories: Iterable[str] = COCO_CATEGORIES,
    *,
    train: str = "instances_train2014.json",
    test: str = "instances_val2014.json",
    images: str | None = None,
    kind: str = "JPEG",
) -> Path:
    """Make a COCO-format set with 6 train and 4 test images; return its folder.

    Every category is in train and in test. Category ids have gaps and are not in the order of the names, as in COCO.
    The numbers of the images are 3, 13, 23, … in train and 8, 18, … in test, listed from the highest.

    Args:
        folder: where annotations and images go.
        categories: names.
        train: name of the annotation file of the train split.
        test: name of the annotation file of the test split.
        images: folder of all images; default is one for each split, named like its annotation file.
        kind: format of the images.
    """
    names = sorted(categories, reverse=True)
    (folder / "annotations").mkdir(parents=True)
    for file, first, count in ((train, 3, 6), (test, 8, 4)):
        image_folder = folder / (
            images if images is not None else file.removesuffix(".json").removeprefix("instances_")
        )
        image_folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": 5 + 2 * row, "name": name} for row, name in enumerate(names)],
        }
        for index in reversed(range(count)):
            number = first + 10 * index
            image = {"id": number, "file_name": f"{number:012d}.{kind.lower()}"}
            (image_folder / image["file_name"]).write_bytes(picture(number, kind=kind))
            content["images"].append(image)
        for row in range(max(count, len(names))):
            add_annotation(content, first + 10 * (row % count), names[row % len(names)])
        (folder / "annotations" / file).write_text(json.dumps(content))
    return folder


def add_annotation(content: dict[str, Any], image: int, category: str, crowd: int = 0) -> None:
    """Add an annotation to the content of a COCO file."""
    category_id = next(item["id"] for item in content["categories"] if item["name"] == category)
    content["annotations"].append(
        {
            "id": len(content["annotations"]) + 1,
            "image_id": image,
            "category_id": category_id,
            "iscrowd": crowd,
            "bbox": [1, 2, 3, 4],
            "area": 12,
            "segmentation": {"counts": "00", "size": [36, 48]} if crowd else [[1, 2, 3, 4, 5, 6]],
        }
    )


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def zipped(folder: Path, target: Path) -> Path:
    """Pack a folder as a zip file, in an order that is not that of the names."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return target


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files too: path to bytes, None for a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def part_of(source: Dataset, folder: Path, name: str, classes: Iterable[str]) -> Dataset:
    """Make a data set with some classes of another one, and the images that have one of them."""
    kept = set(classes)
    table = source.labels()
    labels = [[label for label in row if label in kept] for row in table["labels"].to_pylist()]
    rows = [index for index, row in enumerate(labels) if row]
    column = pa.array([labels[index] for index in rows], table.schema.field("labels").type)
    shutil.copytree(source.path, folder)
    part = table.take(rows).set_column(table.schema.get_field_index("labels"), "labels", column)
    pq.write_table(part, folder / "labels.parquet")
    facts = json.loads((folder / "dataset.json").read_text())
    digest = hashlib.sha256((folder / "labels.parquet").read_bytes()).hexdigest()
    facts |= {"name": name, "classes": sorted(kept), "labels_sha256": digest}
    facts["fingerprint"] = hashlib.sha256(json.dumps([facts, labels]).encode()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(facts | {"digest": card_digest(facts)}))
    return Dataset.open(folder)
