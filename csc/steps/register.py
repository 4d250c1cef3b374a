"""register: make the model of a task a version in the registry, and hand its address to the next task."""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from csc.errors import BadModel
from csc.model import ModelCard, fingerprint, read_card
from csc.report.run import Run, TaskResult
from csc.retry import with_retries
from csc.serving.packaging import package_model
from csc.storage import read_json, write_json
from csc.tracking.runs import Registered, Tracker

__all__ = ["RegisteredTask", "read_registered", "register"]

TRACKED = ("mAP", "CF1", "OF1", "CP", "CR", "OP", "OR", "FPR", "H", "ECE", "forgetting")


@dataclass(frozen=True)
class RegisteredTask:
    """`registered.json`: the model version of a task, and the results of the run up to it."""

    model: Registered
    run: Run


def read_registered(path: str) -> RegisteredTask:
    """Read `registered.json`."""
    content = read_json(Path(path))
    try:
        return RegisteredTask(Registered(**content["model"]), Run.from_json(content["run"]))
    except (KeyError, TypeError) as error:
        raise BadModel(f"{path}: not the record of a registered task ({error})") from None


@with_retries
def register(model: str, metrics: str, test_view: str, out: str, prior: str = "") -> dict[str, str | int | float]:
    """Register a model with its metrics, write `registered.json`, and return where the version is.

    Args:
        model: model folder.
        metrics: `metrics.json` of the task.
        test_view: `test.parquet`, noted as the data the metrics are of.
        out: file to write.
        prior: `registered.json` of the task before, whose results are carried on.
    """
    folder = Path(model)
    card, numbers, training = read_card(folder), read_json(Path(metrics)), read_json(folder / "training.json")
    tracked = {name: float(numbers[name]) for name in TRACKED}
    per_class = {f"AP/{name}": float(value) for name, value in numbers["AP"].items()}
    views = {"train": (training["view"], int(training["images"])), "test": (test_view, int(numbers["images"]))}
    tracker, mark = Tracker(card), fingerprint(folder)
    with tempfile.TemporaryDirectory(prefix="csc-package-") as aside:
        package = Path(aside) / "package"
        package_model(folder, package)
        logged = tracker.log_model(package, mark)
    tracker.log_inputs(views, read_registered(prior).model.model_id if prior else None)
    tracker.log_task(logged.model_id, tracked, per_class, training["epochs"])
    registered = tracker.register(logged, mark)
    tracker.log_scenario(tracked)
    record = {"model": asdict(registered), "run": _carried_on(card, training, numbers, prior).to_json()}
    tracker.keep_record(record)
    tracker.finish()
    write_json(Path(out), record)
    print(f"task {card.task}/{card.tasks}: {registered.uri} (alias task-{card.task:02d})")
    return {
        **card.facts(),
        "mlflow_uri": registered.uri,
        "model_version": registered.version,
        "mlflow_run_id": registered.run_id,
        "mAP": tracked["mAP"],
    }


def _carried_on(card: ModelCard, training: dict[str, Any], numbers: dict[str, Any], prior: str) -> Run:
    """The run so far with this task's result at its end."""
    result = TaskResult(card.task, card.new, card.classes, numbers, int(training["images"]), float(training["seconds"]))
    return Run(
        scenario=card.scenario,
        method=card.method,
        seed=int(card.config["seed"]),
        initialisation=str(card.initialisation["text"]),
        data_fingerprint=card.data_fingerprint,
        code_version=card.code_version,
        tasks=(*(read_registered(prior).run.tasks if prior else ()), result),
        held_out=int(card.config["held_out"]),
    )
