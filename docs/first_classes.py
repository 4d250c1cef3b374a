"""Make a small data set of the first classes of another one.

    python docs/first_classes.py data/voc 8 voc8 && csc ingest csv --source voc8 --name voc8 --out data/voc8

It has the images that hold one of these classes, and no labels of others.
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from csc.data.dataset import Dataset
from csc.data.shards import ImageShards


def write_part(dataset: Dataset, labels_of: Callable[[dict[str, Any]], set[str] | None], out: Path) -> None:
    """Write images and a CSV file of their labels, which a function gives for a row of the table: None for no image."""
    shards = ImageShards(dataset.shards_uri)
    (out / "images").mkdir(parents=True)
    rows = [("image", "labels", "split")]
    for image in dataset.labels().to_pylist():
        if (labels := labels_of(image)) is not None:
            name = f"images/{image['image_id']}.jpg"
            (out / name).write_bytes(shards.jpeg(image["shard"], image["row"]))
            rows.append((name, ";".join(sorted(labels)), image["split"]))
    with (out / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def main(uri: str, count: int, out: Path) -> None:
    """Write the part of the first classes."""
    dataset = Dataset.open(uri)
    chosen = set(dataset.classes[:count])
    write_part(dataset, lambda image: chosen.intersection(image["labels"]) or None, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
