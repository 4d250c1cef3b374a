"""Files that are kept with the runs of tasks, and fetched again by the run of their scenario."""

import shutil
import tempfile
from pathlib import Path

from csc.tracking.calls import translate_errors
from csc.tracking.queries import with_tags
from csc.tracking.runs import Tracker
from csc.tracking.server import connect

__all__ = ["SCORES", "fetch_files", "keep_file"]

SCORES = "scores.parquet"


def keep_file(tracker: Tracker, path: str, name: str) -> None:
    """Keep a file with the task's run under a name; keeping it again changes nothing."""
    with translate_errors(), tempfile.TemporaryDirectory(prefix="csc-file-") as folder:
        named = Path(folder) / name
        shutil.copyfile(path, named)
        tracker.client.log_artifact(tracker.task_run.info.run_id, str(named))


def fetch_files(scenario_run_id: str, name: str, folder: Path, task: int | None = None) -> dict[int, Path]:
    """The files of a name that the tasks of a scenario run have kept, by task; tasks that kept none are left out.

    Args:
        scenario_run_id: of the run whose tasks are meant.
        name: of the file.
        folder: for files that are not on this machine.
        task: only the file of this one.
    """
    found = {}
    tags = {"csc.role": "task", "csc.scenario_run": scenario_run_id}
    tags |= {} if task is None else {"csc.task": str(task)}
    with translate_errors():
        client = connect()
        experiment = client.get_run(scenario_run_id).info.experiment_id
        for run in client.search_runs([experiment], with_tags(tags)):
            if any(item.path == name for item in client.list_artifacts(run.info.run_id)):
                target = folder / run.info.run_id
                target.mkdir()
                found[int(run.data.tags["csc.task"])] = Path(
                    client.download_artifacts(run.info.run_id, name, str(target))
                )
    return dict(sorted(found.items()))
