"""The door to MLflow: runs, models and the registry, each made once however often a step is tried.

One experiment per data set. A scenario run is a parent run whose metrics have the task as step; each task is a child
run whose metrics have the epoch as step. A model is logged with the model before as its input, and registered under
one name per (method, scenario) with aliases `task-01` … and `final`. Runs, models and versions are found again by their
`csc.*` tags, never by who made them.

A server that is away is waited for (`csc.tracking.retry`). Training goes on without it, and register tells it the
epochs it missed. Every call may be repeated: metrics and inputs that are there already are left alone, and what would
be made twice is looked for before each try.

Where Kubeflow Pipelines has its MLflow plugin switched on, every step finds a run of its own in `MLFLOW_RUN_ID`. The
first step of a task that tracks, usually train, makes that run the task's run by giving it our tags; later steps and
later tries find it by them, and mark their own runs as steps of it (`csc.task_run`). All this happens in the plugin's
experiment. The scenario's run is still our own, one per run key, below the plugin's run of the pipeline: one pipeline
may hold many scenario runs, and one scenario run may take many pipelines. Settings are parameters of that run only, so
they never meet the parameters that the plugin writes to its runs.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from csc.errors import BadModel, TrackingError
from csc.model import ModelCard, fingerprint
from csc.scenario import Scenario
from csc.tracking.retry import at_second_try, once, one_line, quiet, tracking_uri, without_secrets

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, LoggedModel, Metric, Run
    from mlflow.tracking import MlflowClient

__all__ = [
    "Registered",
    "ScenarioRun",
    "TaskProgress",
    "Tracker",
    "close_runs",
    "curve",
    "fetch_model",
    "find_record",
    "finish_scenario",
    "finished_runs",
    "model_here",
    "model_name",
    "progress_since",
    "reach",
    "run_key",
    "tracking_uri",
]

PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
RECORD = "registered.json"


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


def model_name(scenario: str, method: str) -> str:
    """The registered model that holds the tasks of a scenario learned by a method."""
    return f"{scenario}-{method}"


def run_key(card: ModelCard) -> str:
    """What makes two scenario runs the same run: settings, scenario, data and code."""
    return card.settings().fingerprint(card.scenario, card.data_fingerprint, card.code_version)


def reach() -> str:
    """Ask the tracking server something small; return its address, without secrets, once it has answered."""
    with one_line():
        _client().search_experiments(max_results=1)
    return without_secrets(tracking_uri())


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
    with one_line():
        _client()
        import mlflow

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
        self._away = False  # whether the server went away while epochs were logged

    @cached_property
    def client(self) -> "MlflowClient":
        """The MLflow client, imported when first needed."""
        with one_line():
            return _client()

    @cached_property
    def injected(self) -> "Run | None":
        """The run that KFP's MLflow plugin made for this step; none without it, or if it made it on another server."""
        if not (run_id := os.environ.get("MLFLOW_RUN_ID")):
            return None
        with one_line():
            client = self.client
            from mlflow.exceptions import MlflowException

            try:
                return client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        place = f"task {self.card.task}/{self.card.tasks}: MLflow at {without_secrets(tracking_uri())}"
        print(f"{place} has no run {run_id}, which MLFLOW_RUN_ID names; it gets runs of its own", flush=True)
        return None

    @cached_property
    def experiment_id(self) -> str:
        """The experiment of the data set, made when first needed; with KFP's plugin, the plugin's."""
        if self.injected is not None:
            return str(self.injected.info.experiment_id)
        name = f"csc-{Scenario.parse(self.card.scenario).dataset}"
        kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI shows training runs, not traces

        def find() -> str | None:
            found = self.client.get_experiment_by_name(name)
            return str(found.experiment_id) if found is not None else None

        with one_line():
            return once(find, lambda: str(self.client.create_experiment(name, _artifact_location(), kind)))

    @cached_property
    def child(self) -> "Run":
        """The run of this task: the one that has its tags, else the one KFP made for this step, else a new one."""
        with one_line():
            run = self._found(self._task)
            if run is None:
                scenario = self._scenario_run()
                run = once(lambda: self._found(self._task), lambda: self._task_run(scenario), looked=True)
            step = self.injected
            if step is not None and step.info.run_id != run.info.run_id and "csc.role" not in step.data.tags:
                self._set_tags(step, {**self._task, "csc.role": "step", "csc.task_run": run.info.run_id})
            if run.info.status in ("FAILED", "KILLED"):  # so is the scenario's, by `close_runs`
                self._open(self.client.get_run(run.data.tags["csc.scenario_run"]))
            return self._open(run)

    @property
    def parent_id(self) -> str:
        """The run of the whole scenario; every task's run names it."""
        return str(self.child.data.tags["csc.scenario_run"])

    @property
    def _task(self) -> dict[str, str]:
        """The tags by which the task's run is found."""
        return {"csc.role": "task", "csc.run_key": self.key, "csc.task": str(self.card.task)}

    def _facts(self) -> dict[str, str]:
        """What every run says of itself."""
        return {
            "csc.scenario": self.card.scenario,
            "csc.method": self.card.method,
            "csc.seed": str(self.card.config["seed"]),
            "csc.data": self.card.data_fingerprint,
            "csc.code_version": self.card.code_version,
            "csc.initialisation": str(self.card.initialisation.get("text", "")),
        }

    def _found(self, tags: Mapping[str, str]) -> "Run | None":
        """The run with these tags; of several, all steps take the oldest."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        oldest = ["attributes.start_time ASC", "attributes.run_id ASC"]
        return next(iter(self.client.search_runs([self.experiment_id], query, max_results=1, order_by=oldest)), None)

    def _open(self, run: "Run") -> "Run":
        """Say of a run that an earlier try has closed that work on it goes on."""
        if run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, "RUNNING")
        return run

    def _scenario_run(self) -> "Run":
        """The run of the whole scenario with its settings, found or made."""
        card = self.card
        own = {"csc.role": "scenario", "csc.run_key": self.key}

        def make() -> "Run":
            above = {"mlflow.parentRunId": self._pipeline_run(self.injected)} if self.injected is not None else {}
            name = f"{card.scenario} {card.method} seed {card.config['seed']}"
            return self.client.create_run(self.experiment_id, tags={**self._facts(), **own, **above}, run_name=name)

        run = once(lambda: self._found(own), make)
        self._log_params(run, {**card.settings().flat(), "scenario": card.scenario, "code_version": card.code_version})
        return self._open(run)

    def _pipeline_run(self, step: "Run") -> str:
        """The topmost of the runs that KFP's plugin has nested."""
        while above := step.data.tags.get("mlflow.parentRunId"):
            step = self.client.get_run(above)
        return str(step.info.run_id)

    def _task_run(self, scenario: "Run") -> "Run":
        """A run for this task: that of the step if KFP made one and no task has it yet, else a new one."""
        tags = {**self._facts(), **self._task, "csc.scenario_run": scenario.info.run_id}
        if self.injected is not None and self.injected.data.tags.get("csc.role") != "task":
            self._set_tags(self.injected, tags)
            return self.client.get_run(self.injected.info.run_id)
        tags["mlflow.parentRunId"] = scenario.info.run_id
        return self.client.create_run(self.experiment_id, tags=tags, run_name=f"task {self.card.task:02d}")

    def _set_tags(self, run: "Run", tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _log_params(self, run: "Run", values: Mapping[str, Any]) -> None:
        """Log parameters that are not there yet; those of one run key never differ."""
        from mlflow.entities import Param

        missing = [Param(key, str(value)) for key, value in values.items() if key not in run.data.params]
        for start in range(0, len(missing), PARAMS_PER_BATCH):
            self.client.log_batch(run.info.run_id, params=missing[start : start + PARAMS_PER_BATCH])

    @cached_property
    def _epochs(self) -> set[int]:
        """The epochs (from 1) of this task that the server knew when we first asked."""
        if "train/loss" not in self.child.data.metrics:
            return set()
        return {item.step for item in self.client.get_metric_history(self.child.info.run_id, "train/loss")}

    def log_epoch(self, epoch: int, log: Mapping[str, float]) -> None:
        """Log what an epoch (from 0) of the task's training came to, unless it is there already.

        Training does not stop for a server that has gone away: `log_task` completes what is missing here.
        """
        if self._away:
            return
        try:
            with one_line():
                self._log_metrics(_of_epoch(epoch, log) if epoch + 1 not in self._epochs else [])
        except TrackingError as error:
            self._away = True
            print(f"task {self.card.task}/{self.card.tasks}: {error}; training goes on without it", flush=True)

    def _log_metrics(self, metrics: Sequence["Metric"]) -> None:
        """Log metrics of the task's run, all of a call's or none where they fit one batch."""
        for start in range(0, len(metrics), METRICS_PER_BATCH):
            self.client.log_batch(self.child.info.run_id, metrics=metrics[start : start + METRICS_PER_BATCH])

    def log_inputs(self, views: Mapping[str, tuple[str, int]], prior: str | None) -> None:
        """Note task views, by what they are for, and the model before as inputs of the task's run.

        Args:
            views: path and rows of each.
            prior: id of the logged model before.
        """
        from mlflow.entities import LoggedModelInput

        datasets = [self._dataset(path, context, rows) for context, (path, rows) in views.items()]
        models = [LoggedModelInput(prior)] if prior is not None else []
        # MLflow looks for a data set and then makes it: a run that does so at the same moment may be quicker.
        with one_line():
            at_second_try(lambda: self.client.log_inputs(self.child.info.run_id, datasets=datasets, models=models))

    def _dataset(self, path: str, context: str, rows: int) -> "DatasetInput":
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.data.sources import LocalArtifactDatasetSource
        from mlflow.entities import DatasetInput, InputTag

        name = f"{self.card.scenario} task {self.card.task:02d} {context}"
        digest = self.card.data_fingerprint[:16]
        dataset = MetaDataset(LocalArtifactDatasetSource(path), name=name, digest=digest)._to_mlflow_entity()
        return DatasetInput(dataset, [InputTag("mlflow.data.context", context), InputTag("csc.rows", str(rows))])

    def log_model(self, package: Path, mark: str) -> "LoggedModel":
        """Log a packaged model as output of the task's run; a second call changes nothing.

        Args:
            package: folder made by `package_model`.
            mark: fingerprint of the model, by which an earlier try is recognised.
        """
        client, card = self.client, self.card
        oldest = [{"field_name": "creation_timestamp", "ascending": True}]

        def find() -> "LoggedModel | None":
            query = f"tags.`csc.fingerprint` = '{mark}'"
            found = client.search_logged_models([self.experiment_id], query, max_results=1, order_by=oldest)
            return next(iter(found), None)

        def make() -> "LoggedModel":
            name = f"{model_name(card.scenario, card.method)}-task-{card.task:02d}"
            tags = {"csc.fingerprint": mark, "csc.run_key": self.key, "csc.task": str(card.task)}
            params = {key: str(value) for key, value in card.settings().flat().items()}
            return client.create_logged_model(self.experiment_id, name, self.child.info.run_id, tags, params)

        with one_line():
            model = once(find, make)
            if str(model.status) != "READY":  # new, or left behind by a try that died while uploading
                client.log_model_artifacts(model.model_id, str(package))
                model = client.finalize_logged_model(model.model_id, "READY")
            self._log_output(model.model_id)
            return model

    def _log_output(self, model_id: str) -> None:
        """Note a model as output of the task's run; noted twice, it would be an error."""
        from mlflow.entities import LoggedModelOutput

        def linked(run: "Run") -> str | None:
            outputs = run.outputs.model_outputs if run.outputs else []
            return next((item.model_id for item in outputs if item.model_id == model_id), None)

        def link() -> str:
            self.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, self.card.task)])
            return model_id

        run_id = self.child.info.run_id
        if not linked(self.child):
            once(lambda: linked(self.client.get_run(run_id)), link, looked=True)

    def log_task(
        self,
        model_id: str,
        metrics: Mapping[str, float],
        per_class: Mapping[str, float],
        epochs: Sequence[Mapping[str, float]],
    ) -> None:
        """Log what is not there yet of how a task's training went and what its model came to.

        Args:
            model_id: of the logged model, to which the task's metrics are tied.
            metrics: of the task.
            per_class: metrics of single classes.
            epochs: what each epoch came to.
        """
        from mlflow.entities import Metric

        now, task, known = int(time.time() * 1000), self.card.task, self.child.data.metrics
        with one_line():
            missing = [_of_epoch(epoch, log) for epoch, log in enumerate(epochs) if epoch + 1 not in self._epochs]
            logged = [metric for epoch in missing for metric in epoch]
            logged += [
                Metric(key, value, now, task, model_id=model_id) for key, value in metrics.items() if key not in known
            ]
            logged += [Metric(key, value, now, task) for key, value in per_class.items() if key not in known]
            self._log_metrics(logged)

    def register(self, model: "LoggedModel", mark: str) -> Registered:
        """Make a logged model the task's registered version, aliases last; a second call changes nothing.

        Args:
            model: made by `log_model`.
            mark: its fingerprint.
        """
        card = self.card
        name = model_name(card.scenario, card.method)
        with one_line():
            number = self._version(name, model.model_id, mark)
            for alias in (f"task-{card.task:02d}", *(["final"] if card.task == card.tasks else [])):
                self.client.set_registered_model_alias(name, alias, number)
        runs = self.child.info.run_id, self.parent_id
        return Registered(name, number, model.model_id, mark, *runs, location=model.artifact_location)

    def _version(self, name: str, model_id: str, mark: str) -> str:
        """The number of the model's version below a name, found or made; so is the name."""
        from mlflow.exceptions import MlflowException

        card, client = self.card, self.client
        tags = {
            "csc.fingerprint": mark,
            "csc.scenario": card.scenario,
            "csc.task": str(card.task),
            "csc.seed": str(card.config["seed"]),
            "csc.classes_seen": str(len(card.classes)),
            "csc.code_version": card.code_version,
            "csc.run_key": self.key,
        }

        def find() -> str | None:
            found = client.search_model_versions(f"name = '{name}' and tags.`csc.fingerprint` = '{mark}'")
            return min((str(version.version) for version in found), key=int, default=None)

        def make() -> str:
            source, run_id = f"models:/{model_id}", self.child.info.run_id
            return str(client.create_model_version(name, source, run_id, tags, model_id=model_id).version)

        try:
            return once(find, make)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        with contextlib.suppress(MlflowException):  # somebody else may have made it by now; if not, the next line fails
            client.create_registered_model(name, tags={"csc.scenario": card.scenario, "csc.method": card.method})
        return once(find, make)

    def log_scenario(self, metrics: Mapping[str, float]) -> None:
        """Log the task's metrics with the scenario's run, at step = task, unless they are there already."""
        from mlflow.entities import Metric

        now, task = int(time.time() * 1000), self.card.task
        with one_line():
            history = self.client.get_metric_history(self.parent_id, next(iter(metrics)))
            if task not in {point.step for point in history}:  # all of a step are logged in one call
                points = [Metric(key, value, now, task) for key, value in metrics.items()]
                self.client.log_batch(self.parent_id, metrics=points)

    def keep_record(self, content: Mapping[str, Any]) -> None:
        """Keep `registered.json` with the task's run, for a pipeline that begins with the next task."""
        with one_line():
            self.client.log_dict(self.child.info.run_id, dict(content), RECORD)

    def finish(self) -> None:
        """Mark the task's run as finished."""
        with one_line():
            self.client.set_terminated(self.child.info.run_id, "FINISHED")


def find_record(name: str, task: int, key: str) -> dict[str, Any] | None:
    """What `keep_record` kept for the newest version of a registered model that is of this task and this run.

    Args:
        name: of the registered model.
        task: number of the task.
        key: of the scenario run, see `run_key`.
    """
    with one_line():
        client = _client()
        import mlflow

        query = f"name = '{name}' and tags.`csc.run_key` = '{key}' and tags.`csc.task` = '{task}'"
        found = client.search_model_versions(query)
        if not found:
            return None
        newest = max(found, key=lambda version: int(version.version))
        record: dict[str, Any] = mlflow.artifacts.load_dict(f"runs:/{newest.run_id}/{RECORD}")
        return record


def finish_scenario(run_id: str, values: Mapping[str, float], step: int, page: str) -> None:
    """Complete a parent run with the summary of all tasks and the report's page; what it says already is left alone."""
    with one_line():
        client = _client()
        from mlflow.entities import Metric

        known, now = client.get_run(run_id).data.metrics, int(time.time() * 1000)
        metrics = [Metric(key, value, now, step) for key, value in values.items() if known.get(key) != value]
        client.log_batch(run_id, metrics=metrics)
        client.log_text(run_id, page, "report.html")
        client.set_terminated(run_id, "FINISHED")


def close_runs(keys: Iterable[str], status: str) -> list[str]:
    """Close what is still open of scenario runs that ended early: their own runs and those of their tasks.

    A run that is open for ever looks as if somebody were still at work on it. The next try opens it again.

    Args:
        keys: of the scenario runs, see `run_key`.
        status: `FAILED` or `KILLED`.

    Returns:
        The names of the runs that were open.
    """
    if _nothing_tracked():
        return []
    closed = []
    with one_line():
        client = _client()
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for key in keys:
            query = f"tags.`csc.run_key` = '{key}' and attributes.status = 'RUNNING'"
            for run in client.search_runs(experiments, query):
                client.set_terminated(run.info.run_id, status)
                closed.append(str(run.info.run_name))
    return closed


@dataclass(frozen=True)
class ScenarioRun:
    """A finished run of a whole scenario, as the server knows it."""

    run_id: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, float]


def finished_runs(scenario: str) -> list[ScenarioRun]:
    """The finished runs of a scenario, in whatever experiment, newest first; looking changes nothing.

    Args:
        scenario: name, for instance `voc-b0c4`.
    """
    if _nothing_tracked():
        return []
    query = f"tags.`csc.role` = 'scenario' and tags.`csc.scenario` = '{scenario}' and attributes.status = 'FINISHED'"
    with one_line():
        client = _client()
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        page = client.search_runs(experiments, query)
        found = list(page)
        while page.token:
            page = client.search_runs(experiments, query, page_token=page.token)
            found += page
    return [ScenarioRun(run.info.run_id, run.data.tags, run.data.params, run.data.metrics) for run in found]


def curve(run_id: str) -> tuple[float, ...]:
    """The mAP after each task of a scenario run."""
    with one_line():
        history = _client().get_metric_history(run_id, "mAP")
    return tuple(metric.value for metric in sorted(history, key=lambda metric: metric.step))


@dataclass(frozen=True)
class TaskProgress:
    """How far a task has come.

    Attributes:
        task: its number.
        status: of its run: `RUNNING`, `FINISHED`, `FAILED` or `KILLED`.
        epoch: the last one that was logged, from 1; 0 before the first, and of a task with results.
        metrics: the latest value of each; with results, `mAP` is among them.
        changed: when something last happened, in milliseconds since 1970.
    """

    task: int
    status: str
    epoch: int
    metrics: dict[str, float]
    changed: int


def progress_since(scenario: str, method: str, seed: int, since: float) -> list[tuple[ScenarioRun, list[TaskProgress]]]:
    """Scenario runs on which something happened since a time, newest first, each with its tasks; nothing is changed.

    Args:
        scenario: name, for instance `voc-b0c4`.
        method: name.
        seed: of the run.
        since: seconds since 1970.
    """
    if _nothing_tracked():
        return []
    tags = {"csc.role": "scenario", "csc.scenario": scenario, "csc.method": method, "csc.seed": str(seed)}
    query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = []
    with one_line():
        client = _client()
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for run in client.search_runs(experiments, query, max_results=10, order_by=["attributes.start_time DESC"]):
            tasks = _task_progress(client, run)
            changed = max(run.info.start_time, run.info.end_time or 0, *(task.changed for task in tasks))
            if changed >= since * 1000:
                facts = ScenarioRun(run.info.run_id, run.data.tags, run.data.params, run.data.metrics)
                found.append((facts, tasks))
    return found


def _task_progress(client: "MlflowClient", scenario: "Run") -> list[TaskProgress]:
    """The tasks of a scenario run, in their order."""
    query = f"tags.`csc.role` = 'task' and tags.`csc.scenario_run` = '{scenario.info.run_id}'"
    tasks = []
    for run in client.search_runs([scenario.info.experiment_id], query):
        metrics, epoch = run.data.metrics, 0
        changed = max(run.info.start_time, run.info.end_time or 0)
        if "train/loss" in metrics and "mAP" not in metrics:
            newest = max(client.get_metric_history(run.info.run_id, "train/loss"), key=lambda point: point.step)
            epoch, changed = newest.step, max(changed, newest.timestamp)
        tasks.append(TaskProgress(int(run.data.tags["csc.task"]), run.info.status, epoch, metrics, changed))
    return sorted(tasks, key=lambda task: task.task)


def _nothing_tracked() -> bool:
    """Whether the database is still to be made, which looking would do."""
    uri = tracking_uri()
    return uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file()


def _client() -> "MlflowClient":
    quiet()
    import mlflow

    mlflow.set_tracking_uri(tracking_uri())  # some calls of the client look there, not at their own address
    return mlflow.MlflowClient(tracking_uri())


def _of_epoch(epoch: int, log: Mapping[str, float]) -> list["Metric"]:
    """What an epoch (from 0) came to, as metrics of the task's run."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [Metric(f"train/{name}", value, now, epoch + 1) for name, value in log.items()]


def _artifact_location() -> str | None:
    """Beside the database for SQLite; the server's own choice otherwise."""
    uri = tracking_uri()
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlflow-artifacts").as_uri()
