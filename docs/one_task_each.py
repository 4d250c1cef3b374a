"""Make a data set in which no training image comes twice: each keeps the labels of one of its tasks alone.

    python docs/one_task_each.py data/voc voc-b4c2 once4
    csc ingest csv --source once4 --name voconce4 --out data/voconce4

The scenarios label an image in every task that has one of its classes. Here it is in one of these tasks, chosen by its
name, so classes of other tasks are visible in it and labelled nowhere, as they are when `csc extend` brings new images.
Test images keep all labels.
"""

import sys
from pathlib import Path
from typing import Any
from zlib import crc32

from first_classes import write_part

from csc.data.dataset import Dataset
from csc.scenario import Scenario


def main(uri: str, scenario: str, out: Path) -> None:
    """Write the images with the labels of one task each."""
    dataset = Dataset.open(uri)
    tasks = Scenario.parse(scenario).tasks(dataset.classes)

    def labels_of(image: dict[str, Any]) -> set[str]:
        labels = set(image["labels"])
        own = [labels.intersection(task.new) for task in tasks if labels.intersection(task.new)]
        return own[crc32(image["image_id"].encode()) % len(own)] if own and image["split"] == "train" else labels

    write_part(dataset, labels_of, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
