"""The evidence of tasks in MLflow: kept with each task's run, and fetched again for a page of the scenario's run."""

import tempfile
from pathlib import Path

from csc.data.evidence import Evidence, read_evidence
from csc.tracking.files import fetch_files, keep_file
from csc.tracking.runs import Tracker

__all__ = ["fetch_evidence", "keep_evidence"]

FILE = "evidence.parquet"


def keep_evidence(tracker: Tracker, evidence: str) -> None:
    """Keep the evidence that `evaluate` wrote with the task's run; keeping it again changes nothing."""
    keep_file(tracker, evidence, FILE)


def fetch_evidence(scenario_run_id: str) -> tuple[Evidence, ...]:
    """The evidence of a scenario run's tasks, in their order; tasks of versions that kept none are left out."""
    with tempfile.TemporaryDirectory(prefix="csc-evidence-") as folder:
        return tuple(map(read_evidence, fetch_files(scenario_run_id, FILE, Path(folder)).values()))
