"""What an extended model reaches on the classes that it knew before, kept with its runs in MLflow."""

import tempfile
from pathlib import Path

from csc.artifacts import Metrics, RegisteredTask
from csc.tracking.calls import connected
from csc.tracking.files import fetch_files

__all__ = ["fetch_old_classes", "keep_old_classes"]

FILE = "old_classes.json"
LOGGED = ("mAP", "CF1", "OF1", "FPR", "ECE", "forgetting")


def keep_old_classes(registered: RegisteredTask, judged: Metrics) -> None:
    """Log `old_classes/mAP` and others with the runs of task and scenario, and keep all with the task's run.

    Keeping them again changes nothing.
    """
    with connected() as client:
        from mlflow.entities import Metric

        model = registered.model
        for run_id in (model.run_id, model.parent_run_id):
            begun = client.get_run(run_id).info.start_time
            points = [Metric(f"old_classes/{name}", judged[name], begun, registered.run.last.task) for name in LOGGED]
            client.log_batch(run_id, metrics=points)
        client.log_dict(model.run_id, judged.to_plain(), FILE)


def fetch_old_classes(scenario_run_id: str) -> Metrics | None:
    """What `keep_old_classes` kept; none if the run extended no model, or was not told to judge its old classes."""
    with tempfile.TemporaryDirectory(prefix="csc-old-classes-") as folder:
        files = fetch_files(scenario_run_id, FILE, Path(folder))
        return Metrics.read(files[max(files)]) if files else None
