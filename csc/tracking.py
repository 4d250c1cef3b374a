"""The door to MLflow: runs, models and the registry, each made once however often a step is tried.

One experiment per data set. A scenario run is a parent run whose metrics have the task as step; each task is a child
run whose metrics have the epoch as step. A model is logged with the model before as its input, and registered under
one name per (method, scenario) with aliases `task-01` … and `final`.
"""

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import yaml

from csc.errors import BadModel, TrackingError
from csc.model import ModelCard, fingerprint
from csc.scenario import Scenario

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run
    from mlflow.tracking import MlflowClient

__all__ = [
    "Registered",
    "Tracker",
    "fetch_model",
    "finish_scenario",
    "model_here",
    "model_name",
    "package_model",
    "run_key",
    "tracking_uri",
]

REQUIREMENTS = ("torch", "torchvision", "timm", "safetensors", "pyarrow", "pyyaml", "pillow", "pandas")
PARAMS_PER_BATCH = 100


@dataclass(frozen=True)
class Registered:
    """A model version: what one task hands to the next."""

    name: str
    version: str
    model_id: str
    fingerprint: str
    run_id: str
    parent_run_id: str
    location: str = ""

    @property
    def uri(self) -> str:
        """The address by which anyone can load it."""
        return f"models:/{self.name}/{self.version}"


def tracking_uri() -> str:
    """Where runs go: `MLFLOW_TRACKING_URI`, or a database in the present folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').absolute()}"


def model_name(scenario: str, method: str) -> str:
    """The registered model that holds the tasks of a scenario learned by a method."""
    return f"{scenario}-{method}"


def run_key(card: ModelCard) -> str:
    """What makes two scenario runs the same run: settings, scenario, data and code."""
    return card.settings().fingerprint(card.scenario, card.data_fingerprint, card.code_version)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turn whatever MLflow raises into one clear line."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        first = str(error).strip().splitlines()[0]
        raise TrackingError(f"MLflow at {_without_secrets(tracking_uri())}: {first}") from error


def _without_secrets(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def model_here(registered: Registered) -> Path | None:
    """The folder of a registered model whose files lie on this machine, unchanged; it takes no MLflow to read them."""
    place = urlsplit(registered.location)
    folder = Path(unquote(place.path)) / "data" / "model"
    if place.scheme not in ("", "file") or not (folder / "model.json").is_file():
        return None
    return folder if fingerprint(folder) == registered.fingerprint else None


def fetch_model(uri: str, folder: Path | None = None) -> Path:
    """Download a registered model and return the folder with its weights and card.

    Args:
        uri: `models:/name/version`, `models:/name@alias` or a local folder that holds a model.
        folder: where to put the files; a temporary folder if not given.
    """
    if not uri.startswith("models:/"):
        return Path(uri)
    _quiet()
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())
    with _one_line():
        local = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(folder) if folder else None))
    model = local / "data" / "model"
    if not (model / "model.json").is_file():
        raise BadModel(f"{uri}: not a model of this project (no data/model/model.json in it)")
    return model


class Tracker:
    """One task's view of the tracking server."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.key = run_key(card)

    @cached_property
    def client(self) -> "MlflowClient":
        """The MLflow client, imported when first needed."""
        return _client()

    @cached_property
    def experiment_id(self) -> str:
        """The experiment of the data set, made when first needed."""
        name = f"csc-{Scenario.parse(self.card.scenario).dataset}"
        with _one_line():
            found = self.client.get_experiment_by_name(name)
            if found is not None:
                return str(found.experiment_id)
            kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI shows training runs, not traces
            return str(self.client.create_experiment(name, artifact_location=_artifact_location(), tags=kind))

    @cached_property
    def parent(self) -> "Run":
        """The run of the whole scenario."""
        card = self.card
        run = self._find_or_create(
            f"{card.scenario} {card.method} seed {card.config['seed']}", {"csc.role": "scenario"}
        )
        self._log_params(run, {**card.settings().flat(), "scenario": card.scenario, "code_version": card.code_version})
        return run

    @cached_property
    def child(self) -> "Run":
        """The run of this task, below the scenario's."""
        tags = {
            "csc.role": "task",
            "csc.task": str(self.card.task),
            "mlflow.parentRunId": self.parent.info.run_id,
        }
        return self._find_or_create(f"task {self.card.task:02d}", tags)

    def _find_or_create(self, name: str, tags: dict[str, str]) -> "Run":
        own = {**tags, "csc.run_key": self.key}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in own.items())
        with _one_line():
            found = self.client.search_runs([self.experiment_id], query, max_results=1)
            if found:
                self.client.set_terminated(found[0].info.run_id, "RUNNING")
                return found[0]
            facts = {
                "csc.scenario": self.card.scenario,
                "csc.method": self.card.method,
                "csc.seed": str(self.card.config["seed"]),
                "csc.data": self.card.data_fingerprint,
                "csc.code_version": self.card.code_version,
                "csc.initialisation": str(self.card.initialisation.get("text", "")),
            }
            return self.client.create_run(self.experiment_id, run_name=name, tags={**facts, **own})

    def _log_params(self, run: "Run", values: Mapping[str, Any]) -> None:
        """Log parameters that are not there yet; those of one run key never differ."""
        from mlflow.entities import Param

        missing = [Param(key, str(value)) for key, value in values.items() if key not in run.data.params]
        with _one_line():
            for start in range(0, len(missing), PARAMS_PER_BATCH):
                self.client.log_batch(run.info.run_id, params=missing[start : start + PARAMS_PER_BATCH])

    def log_metrics(self, run: "Run", values: Mapping[str, float], step: int) -> None:
        """Log metrics of one step, unless this step is there already."""
        with _one_line():
            _log_metrics(self.client, run.info.run_id, values, step)

    def log_epoch(self, epoch: int, log: Mapping[str, float]) -> None:
        """Log what an epoch (from 0) of the task's training came to, unless it is there already."""
        self.log_metrics(self.child, {f"train/{name}": value for name, value in log.items()}, epoch + 1)

    def log_training(self, training: Mapping[str, Any], prior: str | None) -> None:
        """Note what a task was trained on and how its epochs went, where the training itself has not.

        Args:
            training: content of `training.json`.
            prior: id of the logged model before.
        """
        self.log_dataset(str(training["view"]), "train", int(training["images"]))
        if prior is not None:
            self.log_prior(prior)
        with _one_line():
            logged = {item.step for item in self.client.get_metric_history(self.child.info.run_id, "train/loss")}
        for epoch, log in enumerate(training["epochs"]):
            if epoch + 1 not in logged:
                self.log_epoch(epoch, log)

    def log_dataset(self, path: str, context: str, rows: int) -> None:
        """Note a task view as input of the task's run, by its content digest; no data is copied."""
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.data.sources import LocalArtifactDatasetSource
        from mlflow.entities import DatasetInput, InputTag

        name = f"{self.card.scenario} task {self.card.task:02d} {context}"
        digest = self.card.data_fingerprint[:16]
        dataset = MetaDataset(LocalArtifactDatasetSource(path), name=name, digest=digest)._to_mlflow_entity()
        tags = [InputTag("mlflow.data.context", context), InputTag("csc.rows", str(rows))]
        with _one_line():
            self.client.log_inputs(self.child.info.run_id, datasets=[DatasetInput(dataset, tags)])

    def log_prior(self, model_id: str) -> None:
        """Note the model before as input of the task's run: the lineage from task to task."""
        from mlflow.entities import LoggedModelInput

        with _one_line():
            run = self.client.get_run(self.child.info.run_id)
            known = {item.model_id for item in (run.inputs.model_inputs if run.inputs else [])}
            if model_id not in known:
                self.client.log_inputs(run.info.run_id, models=[LoggedModelInput(model_id)])

    def register(self, package: Path, mark: str, metrics: Mapping[str, float]) -> Registered:
        """Log a packaged model and make it the task's registered version; a second call changes nothing.

        Args:
            package: folder made by `package_model`.
            mark: fingerprint of the model, by which an earlier try is recognised.
            metrics: of the task, tied to the model.
        """
        card = self.card
        name = model_name(card.scenario, card.method)
        with _one_line():
            model = self._logged_model(package, mark, metrics)
            number = self._version(name, model.model_id, mark)
            self.client.set_registered_model_alias(name, f"task-{card.task:02d}", number)
            if card.task == card.tasks:
                self.client.set_registered_model_alias(name, "final", number)
        runs = self.child.info.run_id, self.parent.info.run_id
        return Registered(name, number, model.model_id, mark, *runs, location=model.artifact_location)

    def _logged_model(self, package: Path, mark: str, metrics: Mapping[str, float]) -> "LoggedModel":
        from mlflow.entities import LoggedModelOutput, Metric

        run_id, card = self.child.info.run_id, self.card
        query = f"tags.`csc.fingerprint` = '{mark}'"
        found = self.client.search_logged_models([self.experiment_id], filter_string=query, max_results=1)
        model = (
            found[0]
            if found
            else self.client.create_logged_model(
                self.experiment_id,
                name=f"{model_name(card.scenario, card.method)}-task-{card.task:02d}",
                source_run_id=run_id,
                tags={"csc.fingerprint": mark, "csc.run_key": self.key, "csc.task": str(card.task)},
                params={key: str(value) for key, value in card.settings().flat().items()},
            )
        )
        if str(model.status) != "READY":  # new, or left behind by a try that died while uploading
            self.client.log_model_artifacts(model.model_id, str(package))
            model = self.client.finalize_logged_model(model.model_id, "READY")
        run = self.client.get_run(run_id)
        if model.model_id not in {item.model_id for item in (run.outputs.model_outputs if run.outputs else [])}:
            self.client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, card.task)])
            now, step, of = int(time.time() * 1000), card.task, {"model_id": model.model_id}
            self.client.log_batch(run_id, [Metric(key, value, now, step, **of) for key, value in metrics.items()])
        return model

    def _version(self, name: str, model_id: str, mark: str) -> str:
        from mlflow.exceptions import MlflowException

        card = self.card
        try:
            self.client.create_registered_model(name, tags={"csc.scenario": card.scenario, "csc.method": card.method})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = self.client.search_model_versions(f"name = '{name}' and tags.`csc.fingerprint` = '{mark}'")
        if found:
            return str(found[0].version)
        tags = {
            "csc.fingerprint": mark,
            "csc.scenario": card.scenario,
            "csc.task": str(card.task),
            "csc.seed": str(card.config["seed"]),
            "csc.classes_seen": str(len(card.classes)),
            "csc.code_version": card.code_version,
        }
        made = self.client.create_model_version(
            name, source=f"models:/{model_id}", run_id=self.child.info.run_id, model_id=model_id, tags=tags
        )
        return str(made.version)

    def finish(self, run: "Run") -> None:
        """Mark a run as finished."""
        with _one_line():
            self.client.set_terminated(run.info.run_id, "FINISHED")


def finish_scenario(run_id: str, values: Mapping[str, float], step: int, page: str) -> None:
    """Complete a parent run with the summary of all tasks and the report's page."""
    client = _client()
    with _one_line():
        _log_metrics(client, run_id, values, step)
        client.log_text(run_id, page, "report.html")
        client.set_terminated(run_id, "FINISHED")


def _quiet() -> None:
    """Keep MLflow from calling home and from drawing progress bars into logs; it looks at this when imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def _client() -> "MlflowClient":
    _quiet()
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())  # some calls of the client look there, not at their own address
    return mlflow.MlflowClient(tracking_uri())


def _log_metrics(client: "MlflowClient", run_id: str, values: Mapping[str, float], step: int) -> None:
    """Log metrics of one step; a step that is there already was logged by an earlier try, with the same values."""
    from mlflow.entities import Metric

    if any(metric.step == step for metric in client.get_metric_history(run_id, next(iter(values)))):
        return
    now = int(time.time() * 1000)
    client.log_batch(run_id, metrics=[Metric(key, value, now, step) for key, value in values.items()])


def package_model(model: Path, package: Path) -> None:
    """Wrap a model folder so that `mlflow.pyfunc.load_model` can use it on its own: weights, card, and our code.

    `mlflow.pyfunc.save_model` writes the same files, but first compares the requirements with every package that is
    installed, which takes longer than all the rest.
    """
    _quiet()
    import mlflow
    from mlflow.models import Model

    requirements = [_pinned(name) for name in ("mlflow", *REQUIREMENTS)]
    described = Model()
    files = {"data": "data/model", "code": "code", "conda_env": "conda.yaml", "python_env": "python_env.yaml"}
    mlflow.pyfunc.add_to_model(described, loader_module="csc.serving", **files)
    python = platform.python_version()
    environments = {
        "conda.yaml": {
            "name": "mlflow-env",
            "channels": ["conda-forge"],
            "dependencies": [f"python={python}", "pip", {"pip": requirements}],
        },
        "python_env.yaml": {
            "python": python,
            "build_dependencies": ["pip", "setuptools", "wheel"],
            "dependencies": ["-r requirements.txt"],
        },
    }
    shutil.copytree(model, package / "data" / "model")
    shutil.copytree(Path(__file__).parent, package / "code" / "csc", ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in environments.items():
        (package / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    (package / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    described.model_size_bytes = sum(path.stat().st_size for path in package.rglob("*") if path.is_file())
    described.save(str(package / "MLmodel"))


def _pinned(name: str) -> str:
    """A requirement at the version of this environment, if it is here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{name}=={version(name)}"
    except PackageNotFoundError:
        return name


def _artifact_location() -> str | None:
    """Beside the database for SQLite; the server's own choice otherwise."""
    uri = tracking_uri()
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlflow-artifacts").as_uri()
