"""register: make the model of a task a version in the registry, and hand its address to the next task."""

import tempfile
from pathlib import Path

import msgspec

from csc.artifacts import EVIDENCE, SCORES, Metrics, RegisteredTask, RunResults, TaskResult, Training
from csc.config.groups import RegisterSettings
from csc.data.views import View
from csc.model import TRAINING_LOG, ModelCard, fingerprint, read_card
from csc.retry import with_retries
from csc.serving.packaging import package_model
from csc.tracking.files import keep_file
from csc.tracking.names import changed_settings, model_name
from csc.tracking.notes import task_note
from csc.tracking.registry import describe_version, keep_registered_task, log_model, register_version
from csc.tracking.runs import Tracker

__all__ = ["register"]

# All numbers of a model but the threshold, which is a setting.
TRACKED = tuple(f.name for f in msgspec.structs.fields(Metrics) if f.type is float and f.name != "threshold")


@with_retries
def register(
    model: str, metrics: str, test_view: str, out: str, prior: str = "", scores: str = ""
) -> dict[str, str | int | float]:
    """Register a model with its metrics, write `registered.json`, and return where the version is.

    The test view is noted as the data that the metrics are of, and the results of `prior` are carried on. `scores` is
    the folder with scores, to compare runs image by image, and evidence, for the report: both are kept, if it is given.
    """
    folder = Path(model)
    card, numbers, training = read_card(folder), Metrics.read(metrics), Training.read(folder / TRAINING_LOG)
    prior_task = RegisteredTask.read(prior) if prior else None
    # A model that was extended has other test images.
    comparable = prior_task if prior_task is not None and prior_task.run.scenario == card.scenario else None
    view = View.read(test_view)
    results = _results(card, training, numbers, comparable, view.note)
    tracked = {name: float(numbers[name]) for name in TRACKED}
    tracker, model_fingerprint = Tracker(card), fingerprint(folder)
    with tempfile.TemporaryDirectory(prefix="csc-package-") as aside:
        package = Path(aside) / "package"
        package_model(folder, package)
        logged = log_model(tracker, package, model_fingerprint)
    views = {"train": (training.view, training.images), "test": (test_view, numbers.images)}
    tracker.log_inputs(views, prior_task.model.model_id if prior_task is not None else None)
    tracker.log_task(logged.model_id, tracked, numbers.AP, training.epochs)
    name = prior_task.model.name if prior_task is not None else model_name(card.scenario, card.method)
    kept_back = _kept_back(card.resolved_config().register, numbers.mAP, comparable)
    registered = register_version(tracker, logged, model_fingerprint, name, kept_back)
    tracker.log_scenario(tracked, view.shards_uri)
    task = RegisteredTask(registered, results)
    keep_registered_task(tracker, task)
    for file in (EVIDENCE, SCORES) if scores else ():
        keep_file(tracker, f"{scores}/{file}")
    note = task_note(results, registered.uri, prior_task.model.uri if prior_task is not None else "", kept_back)
    describe_version(tracker, registered, note)
    tracker.finish(note)
    task.write(out)
    print(f"task {card.task}/{card.tasks}: {registered.uri} ({kept_back or f'alias task-{card.task:02d}'})")
    return {
        **card.artifact_metadata(),
        "mlflow_uri": registered.uri,
        "mlflow_run": tracker.address,
        "mAP": round(tracked["mAP"], 2),
    }


def _kept_back(limits: RegisterSettings, reached: float, prior: RegisteredTask | None) -> str:
    """Why a model may not be named by an alias; empty if it may."""
    if reached < limits.min_map:
        return f"kept back from its aliases: mAP {reached:.2f} is below register.min_map={limits.min_map:g}"
    drop = prior.run.last.metrics.mAP - reached if prior is not None else 0.0
    if limits.max_drop and drop > limits.max_drop:
        return f"kept back from its aliases: mAP fell by {drop:.2f}, more than register.max_drop={limits.max_drop:g}"
    return ""


def _results(
    card: ModelCard, training: Training, numbers: Metrics, prior: RegisteredTask | None, data_note: str
) -> RunResults:
    """The results of the run up to this task."""
    judged = tuple(name for name in card.classes if name in numbers.AP)
    result = TaskResult(card.task, card.new, judged, numbers, training.images, training.seconds)
    carried = prior.run.tasks if prior is not None else ()
    return RunResults(
        scenario=card.scenario,
        method=card.method,
        seed=int(card.config["seed"]),
        initialisation=str(card.initialisation["text"]),
        data_fingerprint=card.data_fingerprint,
        code_version=card.code_version,
        tasks=(*carried, result),
        held_out=int(card.config["held_out"]),
        settings=changed_settings(card.scenario, card.resolved_config()),
        data_note=data_note,
    )
