"""build_dataset: the partial-label training view and the test view of a task."""

from pathlib import Path

import numpy as np

from csc.artifacts import Origin, Split
from csc.config import resolve
from csc.data.dataset import Dataset
from csc.data.views import test_view, train_view
from csc.retry import with_retries
from csc.scenario import Scenario

__all__ = ["build_dataset"]


@with_retries
def build_dataset(origin: str, split: str, config_json: str, train_out: str, test_out: str) -> None:
    """Write `train.parquet` and `test.parquet` of one task.

    The setting `labels` says what the training view shows, `held_out` what is tested on.
    """
    task_split = Split.read(split)
    task = task_split.task
    config = resolve(Scenario.parse(task_split.scenario).dataset, config_json)
    dataset = Dataset.open(Origin.from_json(origin).data)
    test = test_view(dataset, task, held_out=config.held_out)
    if Scenario.parse(task_split.scenario).added and not set(task.new) & set(dataset.classes):
        train = test.filter(np.zeros(len(test), bool))  # the old data of a model that is extended: only tested
    else:
        train = train_view(dataset, task, labels=config.labels, held_out=config.held_out)
    train.write(Path(train_out))
    test.write(Path(test_out))
    tested = "held-out training" if config.held_out else "test"
    print(f"task {task.index}/{task.total}: {len(train):,} training images, {len(test):,} {tested} images")
