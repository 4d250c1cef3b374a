"""Runs in MLflow: one per scenario run and one per task, each created once even if a step is tried often.

One experiment per data set. A scenario run is a parent run whose metrics have the task as step; each task is a child
run whose metrics have the epoch as step. Runs are found again by their `csc.*` tags, never by who created them.

A server that goes away during training costs only epochs: training goes on, and register logs those that are missing.
All other calls fail without the server. Every call may be repeated: metrics and inputs that are there already are left
alone. Results carry the time at which their run began, so that MLflow takes a point that two processes log at once for
one and the same.

Where Kubeflow Pipelines has its MLflow plugin switched on, every step finds a run of its own in `MLFLOW_RUN_ID`. The
first step of a task that tracks, usually train, makes that run the task's run by giving it our tags; later steps and
later tries find it by them, and mark their own runs as steps of it (`csc.task_run`). All this happens in the plugin's
experiment. The scenario's run is still our own, one per run key, below the plugin's run of the pipeline: one pipeline
may hold many scenario runs, and one scenario run may take many pipelines. Settings are parameters of that run only, so
they never meet the parameters that the plugin writes to its runs.
"""

import contextlib
import getpass
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from csc.data.evidence import NO_TERMS
from csc.errors import TrackingError
from csc.model import ModelCard
from csc.scenario import Scenario
from csc.tracking.calls import connected, find_or_create, find_or_create_experiment, translate_errors
from csc.tracking.datasets import data_set, task_view
from csc.tracking.names import changed_settings, class_metric, run_title, settings_text
from csc.tracking.notes import NOTE, experiment_note
from csc.tracking.queries import tag_filter
from csc.tracking.saved_pages import saved_pages
from csc.tracking.server import tracking_uri, without_secrets
from csc.tracking.usage import Usage

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, LoggedModelInput, Metric, Run
    from mlflow.tracking import MlflowClient

__all__ = ["Tracker", "finish_scenario", "run_key"]


def run_key(card: ModelCard) -> str:
    """The key of a scenario run; see `Config.run_key`."""
    extended = card.prior_fingerprint if Scenario.parse(card.scenario).added else ""
    return card.resolved_config().run_key(card.scenario, card.data_fingerprint, card.code_version, extended)


class Tracker:
    """The runs of one task and of its scenario on the tracking server."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.key = run_key(card)
        self._away = False  # whether the server went away while epochs were logged
        self._usage: Usage | None = None

    @cached_property
    def client(self) -> "MlflowClient":
        """The MLflow client, imported when first needed."""
        with connected() as client:
            return client

    @cached_property
    def injected(self) -> "Run | None":
        """The run that KFP's MLflow plugin made for this step; none without it, or if it made it on another server."""
        if not (run_id := os.environ.get("MLFLOW_RUN_ID")):
            return None
        with translate_errors():
            client = self.client
            from mlflow.exceptions import MlflowException

            try:
                return client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        server = f"task {self.card.task}/{self.card.tasks}: MLflow at {without_secrets(tracking_uri())}"
        print(f"{server} has no run {run_id}, which MLFLOW_RUN_ID names; it gets runs of its own", flush=True)
        return None

    @cached_property
    def experiment_id(self) -> str:
        """The experiment of the data set, created when first needed; with KFP's plugin, the plugin's."""
        if self.injected is not None:
            return str(self.injected.info.experiment_id)
        dataset = Scenario.parse(self.card.scenario).dataset
        tags = {NOTE: experiment_note(dataset), **saved_pages()}
        with translate_errors():
            return find_or_create_experiment(self.client, f"csc-{dataset}", tags)

    @cached_property
    def task_run(self) -> "Run":
        """The run of this task: the one that has its tags, else the one KFP made for this step, else a new one."""
        tags = self._task_tags
        with translate_errors():
            run = self._find(tags)
            if run is None:
                scenario_run_id = self._find_or_create_scenario_run()
                run = find_or_create(
                    lambda: self._find(tags), lambda: self._create_task_run(scenario_run_id), self._keep_first
                )
            step = self.injected
            if step is not None and step.info.run_id != run.info.run_id and "csc.role" not in step.data.tags:
                self._set_tags(step, {**tags, "csc.role": "step", "csc.task_run": run.info.run_id})
            if run.info.status in ("FAILED", "KILLED"):  # so is the scenario's, by `close_runs`
                self.client.update_run(run.data.tags["csc.scenario_run"], "RUNNING")
            self._reopen(run)
            return run

    @property
    def scenario_run_id(self) -> str:
        """The run of the whole scenario; every task's run names it."""
        return str(self.task_run.data.tags["csc.scenario_run"])

    @property
    def address(self) -> str:
        """The page of the task's run on the tracking server; its id where there is no server."""
        uri, info = without_secrets(tracking_uri()).rstrip("/"), self.task_run.info
        page = f"{uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        return page if uri.startswith(("http://", "https://")) else str(info.run_id)

    @property
    def _task_tags(self) -> dict[str, str]:
        """The tags by which the task's run is found."""
        return {"csc.role": "task", "csc.run_key": self.key, "csc.task": str(self.card.task)}

    def _common_tags(self) -> dict[str, str]:
        """The tags that the runs of the scenario and of its tasks share."""
        return {
            "csc.scenario": self.card.scenario,
            "csc.method": self.card.method,
            "csc.seed": str(self.card.config["seed"]),
            "csc.data": self.card.data_fingerprint,
            "csc.code_version": self.card.code_version,
            "csc.initialisation": str(self.card.initialisation.get("text", "")),
        }

    def _find(self, tags: Mapping[str, str]) -> "Run | None":
        """The run with these tags; of several, all steps take the oldest."""
        oldest = ["attributes.start_time ASC", "attributes.run_id ASC"]
        found = self.client.search_runs([self.experiment_id], tag_filter(tags), max_results=1, order_by=oldest)
        return next(iter(found), None)

    def _keep_first(self, made: "Run", first: "Run") -> None:
        """Delete the run that was just made if another one came first; one that KFP made is left to KFP."""
        if made.info.run_id not in (first.info.run_id, os.environ.get("MLFLOW_RUN_ID")):
            self.client.delete_run(made.info.run_id)

    def _reopen(self, run: "Run") -> None:
        """Mark a run that an earlier try has closed as running."""
        if run.info.status != "RUNNING":
            self.client.update_run(run.info.run_id, "RUNNING")

    def _find_or_create_scenario_run(self) -> str:
        """The id of the run of the whole scenario, with its settings."""
        card = self.card
        own = {"csc.role": "scenario", "csc.run_key": self.key}

        def create() -> "Run":
            above = {"mlflow.parentRunId": self._pipeline_run(self.injected)} if self.injected is not None else {}
            name = run_title(card.scenario, card.resolved_config())
            changed = settings_text(changed_settings(card.scenario, card.resolved_config()))
            tags = {**self._common_tags(), **own, **above, **_source(), "csc.settings": ", ".join(changed)}
            return self.client.create_run(self.experiment_id, tags=tags, run_name=name)

        run = find_or_create(lambda: self._find(own), create, self._keep_first)
        self._log_params(
            run, {**card.resolved_config().flat(), "scenario": card.scenario, "code_version": card.code_version}
        )
        self._reopen(run)
        return str(run.info.run_id)

    def _pipeline_run(self, step: "Run") -> str:
        """The topmost of the runs that KFP's plugin has nested."""
        while above := step.data.tags.get("mlflow.parentRunId"):
            step = self.client.get_run(above)
        return str(step.info.run_id)

    def _create_task_run(self, scenario: str) -> "Run":
        """A run for this task: that of the step if KFP made one and no task has it yet, else a new one."""
        tags = {**self._common_tags(), **self._task_tags, "csc.scenario_run": scenario}
        if self.injected is not None and self.injected.data.tags.get("csc.role") != "task":
            self._set_tags(self.injected, tags)
            return self.client.get_run(self.injected.info.run_id)
        tags["mlflow.parentRunId"] = scenario
        return self.client.create_run(self.experiment_id, tags=tags, run_name=f"task {self.card.task:02d}")

    def _set_tags(self, run: "Run", tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def _log_params(self, run: "Run", values: Mapping[str, Any]) -> None:
        """Log parameters that are not there yet; those of one run key never differ."""
        from mlflow.entities import Param

        missing = [Param(key, str(value)) for key, value in values.items() if key not in run.data.params]
        self.client.log_batch(run.info.run_id, params=missing)

    def _logged_epochs(self) -> set[int]:
        """The epochs (from 1) of this task that the server knows, perhaps from another process that shares it."""
        return {item.step for item in self.client.get_metric_history(self.task_run.info.run_id, "train/loss")}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """While this lasts, epochs are logged with how busy the machine was."""
        with Usage() as self._usage:
            yield

    def log_epoch(self, epoch: int, log: Mapping[str, float]) -> None:
        """Log the losses of an epoch (from 0) of the task's training, unless they are there already.

        Training does not stop for a server that has gone away: `log_task` completes what is missing here.
        """
        if self._away:
            return
        try:
            with translate_errors():
                if epoch + 1 not in self._logged_epochs():
                    metrics = _epoch_metrics(epoch, log, self._usage.means() if self._usage else {})
                    self.client.log_batch(self.task_run.info.run_id, metrics=metrics)
        except TrackingError as error:
            self._away = True
            print(f"task {self.card.task}/{self.card.tasks}: {error}; training goes on without it", flush=True)

    def log_inputs(self, views: Mapping[str, tuple[str, int]], prior: str | None) -> None:
        """Note task views (path and rows of each, by what they are for) and the prior model as inputs of the run."""
        from mlflow.entities import LoggedModelInput

        datasets = [task_view(self.card, context, path, rows) for context, (path, rows) in views.items()]
        models = [LoggedModelInput(prior)] if prior is not None else []
        with translate_errors():
            self._log_inputs(self.task_run.info.run_id, datasets, models)

    def _log_inputs(
        self, run_id: str, datasets: "list[DatasetInput]", models: "list[LoggedModelInput] | None" = None
    ) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_inputs(run_id, datasets, models)
        except MlflowException as error:
            # MLflow looks for a data set and then creates it: another run may have created it in between.
            if error.error_code != "BAD_REQUEST":
                raise
            self.client.log_inputs(run_id, datasets, models)

    def log_task(
        self,
        model_id: str,
        metrics: Mapping[str, float],
        class_ap: Mapping[str, float],
        epochs: Sequence[Mapping[str, float]],
    ) -> None:
        """Log what is missing of a task: its metrics, tied to the logged model, and the losses of its epochs."""
        from mlflow.entities import Metric

        begun, task, known = self.task_run.info.start_time, self.card.task, self.task_run.data.metrics
        with translate_errors():
            logged = self._logged_epochs()
            missing = [(epoch, log) for epoch, log in enumerate(epochs) if epoch + 1 not in logged]
            losses = [metric for epoch, log in missing for metric in _epoch_metrics(epoch, log)]
            results = [Metric(key, value, begun, task, model_id=model_id) for key, value in metrics.items()]
            results += [Metric(class_metric("AP", name), value, begun, task) for name, value in class_ap.items()]
            results = [metric for metric in results if metric.key not in known]
            self.client.log_batch(self.task_run.info.run_id, metrics=losses + results)

    def log_scenario(self, metrics: Mapping[str, float], shards_uri: str) -> None:
        """Log the task's metrics with the scenario's run, at step = task, unless they are there; and what tasks share.

        `shards_uri` is noted as the data of the run.
        """
        from mlflow.entities import Metric

        begun, task = self.task_run.info.start_time, self.card.task
        with translate_errors():
            history = self.client.get_metric_history(self.scenario_run_id, next(iter(metrics)))
            if task not in {point.step for point in history}:  # all of a step are logged in one call
                points = [Metric(key, value, begun, task) for key, value in metrics.items()]
                self.client.log_batch(self.scenario_run_id, metrics=points)
            self._log_inputs(self.scenario_run_id, [data_set(self.card, shards_uri)])
            self.client.log_dict(self.scenario_run_id, self.card.resolved_config().tree(), "config.yaml")

    def finish(self, note: str) -> None:
        """Mark the task's run as finished, with a note on what it is."""
        with translate_errors():
            self.client.set_tag(self.task_run.info.run_id, NOTE, note)
            self.client.set_terminated(self.task_run.info.run_id, "FINISHED")


def finish_scenario(run_id: str, values: Mapping[str, float], step: int, files: Mapping[str, str], note: str) -> None:
    """Complete a scenario's run with the summary of all tasks, files and a note; what is there is left alone."""
    with connected() as client:
        run = client.get_run(run_id)
        complete_run(client, run, values, files, note, timestamp=run.info.start_time, step=step)


def complete_run(
    client: "MlflowClient",
    run: "Run",
    values: Mapping[str, float],
    files: Mapping[str, str],
    note: str,
    *,
    timestamp: int,
    step: int,
) -> None:
    """Log metrics that a run does not have yet, files and a note, and mark it as finished."""
    from mlflow.entities import Metric

    run_id, known = run.info.run_id, run.data.metrics
    metrics = [Metric(key, value, timestamp, step) for key, value in values.items() if known.get(key) != value]
    client.log_batch(run_id, metrics=metrics)
    for name, text in files.items():
        client.log_text(run_id, text, name)
    client.set_tag(run_id, NOTE, note)
    client.set_terminated(run_id, "FINISHED")


def _source() -> dict[str, str]:
    """Who made a run, and from which revision of the code, as far as it can be known."""
    tags = {"mlflow.source.name": "csc", "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(OSError, KeyError):  # a container may run as a user without a name
        tags["mlflow.user"] = getpass.getuser()
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            tags["mlflow.source.git.commit"] = done.stdout.strip()
    return tags


def _epoch_metrics(epoch: int, log: Mapping[str, float], usage: Mapping[str, float] = {}) -> list["Metric"]:
    """What an epoch (from 0) came to, as metrics of the task's run; the terms of the loss are named as such."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    losses = {f"train/{name if name in NO_TERMS else f'loss_{name}'}": value for name, value in log.items()}
    return [Metric(name, value, now, epoch + 1) for name, value in (losses | dict(usage)).items()]
