"""The evidence of tasks in MLflow: kept with each task's run, and fetched again for a page of the scenario's run."""

import shutil
import tempfile
from pathlib import Path

from csc.data.evidence import Evidence, read_evidence
from csc.tracking.queries import with_tags
from csc.tracking.retry import translate_errors
from csc.tracking.runs import Tracker
from csc.tracking.server import connect

__all__ = ["fetch_evidence", "keep_evidence"]

FILE = "evidence.parquet"


def keep_evidence(tracker: Tracker, evidence: str) -> None:
    """Keep the evidence that `evaluate` wrote with the task's run; keeping it again changes nothing."""
    with translate_errors(), tempfile.TemporaryDirectory(prefix="csc-evidence-") as folder:
        named = Path(folder) / FILE
        shutil.copyfile(evidence, named)
        tracker.client.log_artifact(tracker.task_run.info.run_id, str(named))


def fetch_evidence(scenario_run_id: str) -> tuple[Evidence, ...]:
    """The evidence of a scenario run's tasks, in their order; tasks of versions that kept none are left out."""
    found = {}
    with translate_errors(), tempfile.TemporaryDirectory(prefix="csc-evidence-") as folder:
        client = connect()
        experiment = client.get_run(scenario_run_id).info.experiment_id
        tags = with_tags({"csc.role": "task", "csc.scenario_run": scenario_run_id})
        for run in client.search_runs([experiment], tags):
            if any(item.path == FILE for item in client.list_artifacts(run.info.run_id)):
                target = Path(folder) / run.info.run_id
                target.mkdir()
                evidence = read_evidence(client.download_artifacts(run.info.run_id, FILE, str(target)))
                found[evidence.facts.task] = evidence
    return tuple(found[task] for task in sorted(found))
