"""A study in MLflow: one run with the means and deviations of its cells, its tables and its page."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from csc.tracking.calls import connected, find_or_create, find_or_create_experiment
from csc.tracking.names import path_metric
from csc.tracking.notes import LONGEST
from csc.tracking.queries import tag_filter
from csc.tracking.runs import complete_run

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

__all__ = ["log_study"]

EXPERIMENT = "csc-studies"


def log_study(name: str, means: Mapping[str, tuple[float, float | None]], table: str, page: str) -> None:
    """Log what came out of a study so far; the same study again completes its run, and adds no point twice.

    `means` has the mean of each number, and the deviation over seeds where there are several, by a path such as
    `voc-b0c4/CSC/last_mAP`.
    """
    with connected() as client:
        run = _study_run(client, name)
        values = {path_metric(path): mean for path, (mean, _) in means.items()}
        values |= {path_metric(f"{path}_std"): std for path, (_, std) in means.items() if std is not None}
        files = {"table.md": table, "study.html": page}
        complete_run(client, run, values, files, table[:LONGEST], timestamp=int(time.time() * 1000), step=0)


def _study_run(client: "MlflowClient", name: str) -> "Run":
    tags = {"csc.role": "study", "csc.study": name}
    experiment = find_or_create_experiment(client, EXPERIMENT)

    def find() -> "Run | None":
        return next(iter(client.search_runs([experiment], tag_filter(tags), max_results=1)), None)

    return find_or_create(find, lambda: client.create_run(experiment, tags=tags, run_name=name))
