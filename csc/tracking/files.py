"""Files that are kept with runs: those of tasks, which their scenario's run fetches again, and figures."""

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from csc.artifacts import EVIDENCE
from csc.data.evidence import Evidence
from csc.tracking.calls import connected, translate_errors
from csc.tracking.queries import tag_filter, task_of
from csc.tracking.runs import Tracker

if TYPE_CHECKING:
    from mlflow.entities import Run
    from PIL import Image

__all__ = ["download", "fetch_evidence", "fetch_files", "keep_figures", "keep_file"]

PREVIEW = 800  # pixels of the longer side of the copy that a grid of images shows


def keep_file(tracker: Tracker, path: str) -> None:
    """Keep a file with the task's run under its name; keeping it again changes nothing."""
    with translate_errors():
        tracker.client.log_artifact(tracker.task_run.info.run_id, path)


def fetch_files(scenario_run_id: str, name: str, folder: Path, task: int | None = None) -> dict[int, Path]:
    """The files of a name that the tasks of a scenario run have kept, or one of them, by task.

    Tasks that kept none are left out. Files that are not on this machine are put into `folder`.
    """
    found = {}
    tags = {"csc.role": "task", "csc.scenario_run": scenario_run_id}
    tags |= {} if task is None else {"csc.task": str(task)}
    with connected() as client:
        experiment = client.get_run(scenario_run_id).info.experiment_id
        for run in client.search_runs([experiment], tag_filter(tags)):
            if any(item.path == name for item in client.list_artifacts(run.info.run_id)):
                target = folder / run.info.run_id
                target.mkdir()
                found[task_of(run.data.tags)] = download(run, name, target)
    return dict(sorted(found.items()))


def download(run: "Run", name: str, folder: Path) -> Path:
    """A file of a run, by its exact address: for `runs:/…` MLflow would look through all models of the experiment."""
    import mlflow
    from mlflow.utils.uri import append_to_uri_path

    address = append_to_uri_path(run.info.artifact_uri, name)
    return Path(mlflow.artifacts.download_artifacts(address, dst_path=str(folder)))


def fetch_evidence(scenario_run_id: str) -> tuple[Evidence, ...]:
    """The evidence of a scenario run's tasks, in their order; tasks of versions that kept none are left out."""
    with tempfile.TemporaryDirectory(prefix="csc-evidence-") as folder:
        return tuple(map(Evidence.read, fetch_files(scenario_run_id, EVIDENCE, Path(folder)).values()))


def keep_figures(run_id: str, figures: "Mapping[str, Image.Image]", step: int) -> None:
    """Keep figures with a run, by name, where MLflow's grid of images finds them; keeping them again changes nothing.

    MLflow's own `log_image` names its files after the time and a random number, so every try would add another copy.
    """
    with connected() as client, tempfile.TemporaryDirectory(prefix="csc-figures-") as folder:
        begun = client.get_run(run_id).info.start_time
        for name, figure in figures.items():
            key = uuid.uuid5(uuid.NAMESPACE_OID, name)
            path = f"{folder}/{name.replace('/', '~')}+step+{step}+timestamp+{begun}+{key}"
            figure.save(f"{path}.png", optimize=True)
            small = figure.copy()
            small.thumbnail((PREVIEW, PREVIEW))
            small.save(f"{path}+compressed.webp")
        client.log_artifacts(run_id, folder, "images")
        client.set_tag(run_id, "mlflow.loggedImages", "True")
