"""Make a data set in which no training image comes twice: each keeps the labels of one of its tasks alone.

    python docs/one_task_each.py data/voc voc-b4c2 once4
    csc ingest csv --source once4 --name voconce4 --out data/voconce4

The scenarios label an image in every task that has one of its classes. Here it is in one of these tasks, chosen by its
name, so classes of other tasks are visible in it and labelled nowhere, as they are when `csc extend` brings new images.
Test images keep all labels.
"""

import csv
import sys
from pathlib import Path
from zlib import crc32

from csc.data.dataset import Dataset
from csc.data.shards import ImageShards
from csc.scenario import Scenario


def main(uri: str, scenario: str, out: Path) -> None:
    """Write the images and a CSV file of their labels."""
    dataset = Dataset.open(uri)
    tasks, shards = Scenario.parse(scenario).tasks(dataset.classes), ImageShards(dataset.shards_uri)
    (out / "images").mkdir(parents=True)
    rows = [("image", "labels", "split")]
    for image in dataset.labels().to_pylist():
        labels = set(image["labels"])
        if image["split"] == "train" and (own := [task.new for task in tasks if labels.intersection(task.new)]):
            labels &= set(own[crc32(image["image_id"].encode()) % len(own)])
        name = f"images/{image['image_id']}.jpg"
        (out / name).write_bytes(shards.jpeg(image["shard"], image["row"]))
        rows.append((name, ";".join(sorted(labels)), image["split"]))
    with (out / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
