"""What a tracking server holds of a scenario run, as a person would count it."""

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from csc.model import ModelCard
from csc.tracking.database import make_database
from csc.tracking.names import model_name
from csc.tracking.runs import run_key


def fresh_database(folder: Path) -> str:
    """Put an empty MLflow database with all its tables into a folder; return its uri."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mlflow.db").write_bytes(_empty_database())
    return f"sqlite:///{folder / 'mlflow.db'}"


@cache
def _empty_database() -> bytes:
    """Made once per process: to make the tables takes longer than most tests."""
    from mlflow.tracking import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        make_database(Path(folder, "mlflow.db"))
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()  # it makes the first experiment
        return Path(folder, "mlflow.db").read_bytes()


@dataclass(frozen=True)
class Tracked:
    """Everything that belongs to one scenario run, found by its key."""

    client: Any
    card: ModelCard
    experiment: str = "csc-digits"

    @property
    def experiment_id(self) -> str:
        return self.client.get_experiment_by_name(self.experiment).experiment_id

    @property
    def mine(self) -> str:
        return f"tags.`csc.run_key` = '{run_key(self.card)}'"

    def runs(self, role: str) -> list[Any]:
        """Runs of a role, whole, by task and age."""
        found = self.client.search_runs([self.experiment_id], f"{self.mine} and tags.`csc.role` = '{role}'")
        found = sorted(found, key=lambda run: (run.data.tags.get("csc.task", ""), run.info.start_time))
        return [self.client.get_run(run.info.run_id) for run in found]

    def steps(self, run: Any, metric: str) -> list[int]:
        """The steps at which a metric has a point, each as often as it has one."""
        return sorted(item.step for item in self.client.get_metric_history(run.info.run_id, metric))

    def _curves(self, run: Any) -> list[str]:
        """The metrics of a run, without the summary that every report writes again and the load of the machine.

        Nobody sends that again after a server was away.
        """
        return [key for key in sorted(run.data.metrics) if not key.startswith(("avg_", "last_", "system/"))]

    def versions(self) -> list[int]:
        name = model_name(self.card.scenario, self.card.method)
        return sorted(int(one.version) for one in self.client.search_model_versions(f"name = '{name}' and {self.mine}"))

    def count(self) -> dict[str, Any]:
        """Runs, points of each curve, inputs, outputs, models, versions, in a form that two runs can be compared by."""
        inside = [*self.runs("scenario"), *self.runs("task")]
        models = self.client.search_logged_models([self.experiment_id], self.mine)
        return {
            "runs": [len(self.runs(role)) for role in ("scenario", "task")],
            "open": [run.data.tags["csc.role"] for run in inside if run.info.status != "FINISHED"],
            "points": [{key: self.steps(run, key) for key in self._curves(run)} for run in inside],
            "params": [sorted(run.data.params) for run in inside],
            "datasets": [sorted(item.dataset.name for item in run.inputs.dataset_inputs) for run in inside],
            "priors": [len(run.inputs.model_inputs) for run in inside],
            "outputs": [len(run.outputs.model_outputs) for run in inside],
            "models": sorted((model.name, str(model.status), len(model.metrics)) for model in models),
            "versions": len(self.versions()),
        }


@dataclass
class Plugin:
    """What KFP's MLflow plugin does: a run per pipeline, sub-pipeline and step, the last in the step's environment."""

    client: Any
    experiment_id: str
    monkeypatch: pytest.MonkeyPatch
    pipeline: Any = None

    def start_pipeline(self, name: str) -> None:
        self.pipeline = self.client.create_run(self.experiment_id, run_name=name)

    def _nested(self, name: str, above: Any) -> Any:
        tags = {"mlflow.parentRunId": above.info.run_id}
        return self.client.create_run(self.experiment_id, run_name=name, tags=tags)

    def start_step(self, task: int, step: str) -> Any:
        """The driver's part; the step finds its run in the environment."""
        run = self._nested(step, self._nested(f"task-{task:02d}", self.pipeline))
        self.inject(run)
        return run

    def inject(self, run: Any) -> None:
        self.monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
        self.monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", self.experiment_id)

    def end_step(self, run: Any, **params: str) -> None:
        """The launcher's part: it writes the step's parameters as JSON texts and closes the run."""
        for key, value in params.items():
            self.client.log_param(run.info.run_id, key, value)
        self.client.set_terminated(run.info.run_id)
