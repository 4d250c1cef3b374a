"""log_old_classes: keep in MLflow what an extended model reaches on the classes that it knew before."""

from csc.artifacts import Metrics, RegisteredTask
from csc.retry import with_retries
from csc.tracking.old_classes import keep_old_classes

__all__ = ["log_old_classes"]


@with_retries
def log_old_classes(registered: str, metrics: str) -> None:
    """Keep metrics on images that label the old classes with the runs of a registered task; the report shows them.

    `registered` is `registered.json` of the task.
    """
    task, judged = RegisteredTask.read(registered), Metrics.read(metrics)
    keep_old_classes(task, judged)
    print(f"task {task.run.last.task}: kept the metrics of {len(judged.AP)} old classes on {judged.images:,} images")
