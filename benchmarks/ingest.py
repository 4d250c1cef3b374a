"""Ingest at the size of COCO 2014: the annotation file, the views of its tasks, and images by number of workers.

The annotation file is made up, with the counts, fields and length of the real one. Its images are empty files: the
reader checks that they are there, and nothing here opens them. A few real JPEG files, listed again and again under
other names, tell how many images workers put into shards.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from benchmarks import Result, interleaved
from csc.data.dataset import Dataset
from csc.data.ingest.coco import COCO_CLASSES, ingest_coco
from csc.data.ingest.coco_annotations import AnnotationFile, read_annotations
from csc.data.ingest.images import ListedImage
from csc.data.ingest.source import Source
from csc.data.ingest.writer import WriteOptions, label_table
from csc.data.views import test_view, train_view
from csc.scenario import Scenario
from csc.storage import write_json

__all__ = ["ingest"]

IMAGES, TEST_IMAGES, ANNOTATIONS = 82_783, 40_504, 604_907
OUTLINES, POINTS = 2_000, 24  # different outlines; points of one, on average: then the file is as long as the real one
CHUNK = 20_000  # annotations written at a time
PHOTOS, SHARD = 1_536, 128


def ingest() -> list[Result]:
    """Compare reading annotations with `json.load`, memory with the file, views with a second, two workers with one."""
    with tempfile.TemporaryDirectory(prefix="csc-bench-") as name:
        root = Path(name)
        file = _make_annotations(root)
        memory = _peak_memory(root) / file.stat().st_size
        variants = {"csc": lambda: _to_labels(root), "json.load": lambda: _load(file)}
        seconds = interleaved(variants, rounds=2)
        per_task = _seconds_per_task(root)
        speed = _images_per_second(root / "photos")
    return [
        Result("ingest", "COCO-2014 annotations to labels.parquet", seconds["csc"] / seconds["json.load"], 2.0,
               "json.load of the file", "lower"),
        Result("ingest", "peak memory of the same", memory, 3.0, "length of the file", "lower"),
        Result("ingest", "views of a task of coco-b0c10", per_task, 1.0, "one second", "lower"),
        Result("ingest", "images with 2 workers", speed[2] / speed[1], None, f"1 worker ({speed[1]:.0f} images/s)"),
    ]  # fmt: skip


def _listing(root: Path) -> tuple[ListedImage, ...]:
    with Source(root) as files:
        folders = (PurePosixPath("train2014"),)
        found = AnnotationFile(PurePosixPath("annotations/instances_train2014.json"), "train", folders)
        return read_annotations(files, found).listing


def _to_labels(root: Path) -> None:
    pq.write_table(label_table(_listing(root)), root / "labels.parquet")


def _load(file: Path) -> None:
    with file.open(encoding="utf-8") as stream:
        json.load(stream)


def _make_annotations(root: Path) -> Path:
    """Write the annotation file and an empty file for each of its images."""
    rng = np.random.default_rng(0)
    numbers = np.sort(rng.choice(581_929, IMAGES, replace=False)).tolist()
    names = [f"COCO_train2014_{number:012d}.jpg" for number in numbers]
    images = [
        f'{{"license": 5, "file_name": "{name}", "coco_url": "http://images.example/train2014/{name}", "height": 480, '
        f'"width": 640, "date_captured": "2013-11-14 16:28:13", "flickr_url": "http://photos.example/{number}_z.jpg", '
        f'"id": {number}}}'
        for number, name in zip(numbers, names, strict=True)
    ]
    categories = [{"supercategory": "thing", "id": row + 1, "name": name} for row, name in enumerate(COCO_CLASSES)]
    path = root / "annotations" / "instances_train2014.json"
    path.parent.mkdir()
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"info": {{"description": "made up"}}, "images": [{", ".join(images)}], "annotations": [')
        file.writelines(_annotations(numbers, rng))
        file.write(f'], "categories": {json.dumps(categories)}}}')
    (root / "train2014").mkdir()
    for name in names:
        (root / "train2014" / name).touch()
    return path


def _annotations(numbers: list[int], rng: np.random.Generator) -> Iterator[str]:
    """Annotations as text, in pieces; a hundredth are crowds."""
    lengths = 2 * rng.poisson(POINTS, OUTLINES)
    outlines = [str(rng.uniform(0, 640, length).round(2).tolist()) for length in lengths]
    for first in range(0, ANNOTATIONS, CHUNK):
        some = min(CHUNK, ANNOTATIONS - first)
        columns = zip(
            rng.integers(OUTLINES, size=some).tolist(),
            (rng.random(some) < 0.01).tolist(),
            rng.integers(len(numbers), size=some).tolist(),
            rng.integers(1, len(COCO_CLASSES) + 1, size=some).tolist(),
            rng.uniform(0, 320, (some, 4)).round(2).tolist(),
            strict=True,
        )
        yield ("" if first == 0 else ", ") + ", ".join(
            f'{{"segmentation": [{outlines[outline]}], "area": {box[2] * box[3]}, "iscrowd": {crowd:d}, "image_id": '
            f'{numbers[image]}, "bbox": {box}, "category_id": {category}, "id": {first + row}}}'
            for row, (outline, crowd, image, category, box) in enumerate(columns)
        )


def _peak_memory(root: Path) -> int:
    """The bytes that a new process needs for it, beyond what it has before."""
    code = f"""
import re
from pathlib import Path
from benchmarks.ingest import _to_labels
def memory(kind):
    return int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
_to_labels(Path({str(root)!r}))
print(1024 * (memory("VmHWM") - before))
"""  # ru_maxrss would count what this process had when it started the other
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _seconds_per_task(root: Path) -> float:
    """Both views of a task, written; the mean over the tasks of coco-b0c10."""
    train = _listing(root)
    test = [row._replace(image_id=f"test-{row.image_id}", split="test") for row in train[:TEST_IMAGES]]
    folder = root / "set"
    folder.mkdir()
    pq.write_table(label_table((*train, *test)), folder / "labels.parquet")
    counts = {"train": {"images": len(train)}, "test": {"images": len(test)}}
    card = {"name": "coco", "classes": list(COCO_CLASSES), "splits": counts, "fingerprint": "none", "source": {}}
    write_json(folder / "dataset.json", card | {"difficult_is_member": True})
    dataset, tasks = Dataset.open(folder), Scenario.parse("coco-b0c10").tasks(COCO_CLASSES)

    def views() -> None:
        for task in tasks:
            train_view(dataset, task).write(folder / "train.parquet")
            test_view(dataset, task).write(folder / "test.parquet")

    return interleaved({"views": views}, rounds=1)["views"] / len(tasks)


def _images_per_second(root: Path) -> dict[int, float]:
    """Images put into shards in a second, by the number of workers; starting them counts."""
    _make_photos(root)

    def made_by(workers: int) -> None:
        shutil.rmtree(root / "out", ignore_errors=True)
        ingest_coco(root, root / "out", "photos", options=WriteOptions(workers=workers, shard_rows=SHARD))

    seconds = interleaved({"1": lambda: made_by(1), "2": lambda: made_by(2)}, rounds=1)
    return {workers: 2 * PHOTOS / seconds[str(workers)] for workers in (1, 2)}


def _make_photos(root: Path) -> None:
    """A set in COCO format whose many names stand for a few files."""
    rng = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    originals = []
    for index in range(16):
        coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        encoded = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=95)
        originals.append(root / f"original-{index}")
        originals[-1].write_bytes(encoded.getvalue())
    for split in ("train", "val"):
        (root / split).mkdir()
        images = [{"id": number, "file_name": f"{number}.jpg"} for number in range(PHOTOS)]
        for number, image in enumerate(images):
            os.link(originals[number % len(originals)], root / split / str(image["file_name"]))
        content = {
            "images": images,
            "annotations": [{"id": 1, "image_id": 0, "category_id": 1}],
            "categories": [{"id": 1, "name": "thing"}],
        }
        write_json(root / "annotations" / f"{split}.json", content)
