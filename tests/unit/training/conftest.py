"""Data and trainers for the tests of training."""

from pathlib import Path

import pytest

from csc.data.dataset import Dataset
from csc.data.ingest.digits import ingest_digits
from csc.data.views import View, train_view
from csc.scenario import Scenario, Task
from tests.unit.training.bench import ROWS, SCENARIO, Bench, first_rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return ingest_digits(tmp_path_factory.mktemp("digits") / "set", train=60, test=20)


@pytest.fixture(scope="module")
def tasks(dataset: Dataset) -> tuple[Task, ...]:
    return Scenario.parse(SCENARIO).tasks(dataset.classes)


@pytest.fixture(scope="module")
def views(dataset: Dataset, tasks: tuple[Task, ...]) -> dict[int, View]:
    """The first training images of both tasks."""
    return {task.index: first_rows(train_view(dataset, task), ROWS) for task in tasks}


@pytest.fixture
def bench(views: dict[int, View], tmp_path: Path) -> Bench:
    return Bench(views, tmp_path)
