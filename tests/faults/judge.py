"""What a run has left, in a form that is compared with that of a run which nothing has disturbed."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open

from csc.model import read_card
from csc.tracking.names import model_name
from tests.faults.commands import Lost, Workspace
from tests.tracked import Tracked


def facts(workspace: Workspace, method: str = "csc") -> dict[str, Any]:
    """Metrics, weights, scores, and what the tracking server has of the run."""
    from mlflow.tracking import MlflowClient

    def newest(step: str, output: str) -> Path:
        """The newest output of a step, of all tries."""
        found = list(workspace.work.glob(f"pipeline/*-{method}-seed*/*/{step}/{output}"))
        if not found:
            raise Lost(f"no {output} of {step} in {workspace.work}")
        return max(found, key=lambda path: path.stat().st_mtime)

    uri = workspace.variables.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace.work}/mlflow.db"
    tracked = Tracked(MlflowClient(uri), read_card(newest("train", "model")))
    record = json.loads(newest("register-2", "registered").read_text())
    return {
        **tracked.count(),
        "aliases": _aliases(tracked),
        "metrics": [task["metrics"] for task in record["run"]["tasks"]],
        "weights": [_digest(newest(step, "model/model.safetensors")) for step in ("train", "train-2")],
        "registered": _registered(tracked, uri),
        "scores": [_digest(newest(step, "scores/scores.parquet")) for step in ("evaluate", "evaluate-2")],
    }


def judge(workspace: Workspace, undisturbed: dict[str, Any], method: str = "csc", *, whole: bool = True) -> None:
    """Raise if anything is not as it should be after a run that has ended well."""
    found = facts(workspace, method)
    for name, expected in undisturbed.items():
        if found[name] != expected:
            raise Lost(f"{name}: {_short(found[name])} instead of {_short(expected)}")
    if left := leftovers(workspace):
        raise Lost(f"left behind: {', '.join(left)}")
    if whole:
        check_whole(workspace.work)


def leftovers(workspace: Workspace) -> list[str]:
    """Temporary files and folders, hidden files, and checkpoints, none of which outlives a finished run."""
    below = [*workspace.temporary.iterdir(), *workspace.work.rglob(".*"), *(workspace.work / "checkpoints").glob("*")]
    return [str(path.relative_to(workspace.folder)) for path in below if not path.name.startswith("torchinductor_")]


def check_whole(folder: Path) -> None:
    """Raise if a file that can be seen is not complete; hidden ones are still being written, or were."""
    for path in folder.rglob("*"):
        reader = _READERS.get(path.suffix or path.name)
        # What kfp notes of a step is read only if the step has ended; MLflow's copies only if they are marked as READY.
        apart = path.name == "executor_output.json" or "mlflow-artifacts" in path.parts
        if reader is None or apart or path.name.startswith(".") or not path.is_file():
            continue
        try:
            reader(path)
        except Exception as error:
            raise Lost(f"half-written: {path} ({error})") from None


def _page(path: Path) -> None:
    if not path.read_text().rstrip().endswith("</html>"):
        raise ValueError("no end")


def _tensors(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        file.keys()


def _json(path: Path) -> None:
    json.loads(path.read_text())


_READERS: dict[str, Callable[[Path], object]] = {
    ".html": _page,
    ".json": _json,
    ".parquet": pq.read_metadata,
    ".safetensors": _tensors,
    ".sha256": _json,
    "metrics": _json,
    "page": _page,
    "registered": _json,
    "split": _json,
    "test_view": pq.read_metadata,
    "train_view": pq.read_metadata,
}


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _aliases(tracked: Tracked) -> dict[str, int]:
    """Which version of the run each alias names, counted from 1; 0 for a version of another run."""
    name = model_name(tracked.card.scenario, tracked.card.method)
    versions = tracked.versions()
    named = tracked.client.get_registered_model(name).aliases
    return {alias: versions.index(int(one)) + 1 if int(one) in versions else 0 for alias, one in named.items()}


def _registered(tracked: Tracked, uri: str) -> list[str]:
    """The digests of the weights in the registry, as somebody who fetches them gets them."""
    import mlflow

    name = model_name(tracked.card.scenario, tracked.card.method)
    found = []
    for version in tracked.versions():
        source = tracked.client.get_model_version(name, str(version)).source
        location = tracked.client.get_logged_model(source.removeprefix("models:/")).artifact_location
        weights = f"{location}/data/model/model.safetensors"
        found.append(_digest(Path(mlflow.artifacts.download_artifacts(weights, tracking_uri=uri))))
    return found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]}…"
