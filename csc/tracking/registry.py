"""Models in MLflow: logged with their task's run, registered as versions, and fetched again.

A model is logged with the model before as its input, and registered under one name per (scenario, method) with aliases
`task-01` … and `final`. Models and versions are found again by the fingerprint of the model folder, so a step that is
tried again adds none.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from csc.artifacts import Registered, RegisteredTask
from csc.errors import BadModel
from csc.model import fingerprint
from csc.tracking.queries import with_tags
from csc.tracking.retry import find_or_create, translate_errors
from csc.tracking.runs import Tracker
from csc.tracking.server import connect

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

__all__ = ["fetch_model", "find_record", "keep_record", "local_model", "log_model", "model_name", "register_version"]

RECORD = "registered.json"


def model_name(scenario: str, method: str) -> str:
    """The registered model that holds the tasks of a scenario learned by a method."""
    return f"{scenario}-{method}"


def local_model(registered: Registered) -> Path | None:
    """The folder of a registered model whose files are on this machine, unchanged; it takes no MLflow to read them."""
    location = urlsplit(registered.location)
    folder = Path(unquote(location.path)) / "data" / "model"
    if location.scheme not in ("", "file") or not (folder / "model.json").is_file():
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
    with translate_errors():
        connect()
        import mlflow

        local = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(folder) if folder else None))
    model = local / "data" / "model"
    if not (model / "model.json").is_file():
        raise BadModel(f"{uri}: not a model of this project (no data/model/model.json in it)")
    return model


def log_model(tracker: Tracker, package: Path, digest: str) -> "LoggedModel":
    """Log a packaged model as output of the task's run; a second call changes nothing.

    Args:
        tracker: of the task.
        package: folder made by `package_model`.
        digest: fingerprint of the model folder, not of the package.
    """
    client, card = tracker.client, tracker.card
    oldest = [{"field_name": "creation_timestamp", "ascending": True}]
    query = with_tags({"csc.fingerprint": digest})

    def find() -> "LoggedModel | None":
        found = client.search_logged_models([tracker.experiment_id], query, max_results=1, order_by=oldest)
        return next(iter(found), None)

    def create() -> "LoggedModel":
        name = f"{model_name(card.scenario, card.method)}-task-{card.task:02d}"
        tags = {"csc.fingerprint": digest, "csc.run_key": tracker.key, "csc.task": str(card.task)}
        params = {key: str(value) for key, value in card.settings().flat().items()}
        return client.create_logged_model(tracker.experiment_id, name, tracker.task_run.info.run_id, tags, params)

    with translate_errors():
        model = find_or_create(find, create)
        if str(model.status) != "READY":  # new, or left behind by a try that died while uploading
            client.log_model_artifacts(model.model_id, str(package))
            model = client.finalize_logged_model(model.model_id, "READY")
        _log_output(tracker, model.model_id)
        return model


def _log_output(tracker: Tracker, model_id: str) -> None:
    """Note a model as output of the task's run; to note it twice would be an error."""
    from mlflow.entities import LoggedModelOutput

    run_id = tracker.task_run.info.run_id

    def noted() -> str | None:
        outputs = tracker.client.get_run(run_id).outputs
        return model_id if outputs and model_id in [item.model_id for item in outputs.model_outputs] else None

    def note() -> str:
        tracker.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, tracker.card.task)])
        return model_id

    find_or_create(noted, note)


def register_version(tracker: Tracker, model: "LoggedModel", digest: str, name: str) -> Registered:
    """Make a logged model the task's registered version, aliases last; a second call changes nothing."""
    card = tracker.card
    with translate_errors():
        number = _version(tracker, name, model.model_id, digest)
        for alias in (f"task-{card.task:02d}", *(["final"] if card.task == card.tasks else [])):
            tracker.client.set_registered_model_alias(name, alias, number)
    runs = tracker.task_run.info.run_id, tracker.scenario_run_id
    return Registered(name, number, model.model_id, digest, *runs, location=model.artifact_location)


def _version(tracker: Tracker, name: str, model_id: str, digest: str) -> str:
    """The number of the model's version below a name, found or created; so is the name."""
    from mlflow.exceptions import MlflowException

    card, client = tracker.card, tracker.client
    tags = {
        "csc.fingerprint": digest,
        "csc.scenario": card.scenario,
        "csc.task": str(card.task),
        "csc.seed": str(card.config["seed"]),
        "csc.classes_seen": str(len(card.classes)),
        "csc.code_version": card.code_version,
        "csc.run_key": tracker.key,
    }

    def find() -> str | None:
        found = client.search_model_versions(f"name = '{name}' and {with_tags({'csc.fingerprint': digest})}")
        return min((str(version.version) for version in found), key=int, default=None)

    def create() -> str:
        source, run_id = f"models:/{model_id}", tracker.task_run.info.run_id
        return str(client.create_model_version(name, source, run_id, tags, model_id=model_id).version)

    try:
        return find_or_create(find, create)
    except MlflowException as error:
        # Users who are not the administrator are told that they may not, where there is nothing yet.
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
            raise
    with contextlib.suppress(MlflowException):  # another run may have created it by now; if not, the next line fails
        client.create_registered_model(name, tags={"csc.scenario": card.scenario, "csc.method": card.method})
    return find_or_create(find, create)


def keep_record(tracker: Tracker, record: RegisteredTask) -> None:
    """Keep `registered.json` with the task's run, for a pipeline that begins with the next task."""
    with translate_errors():
        tracker.client.log_dict(tracker.task_run.info.run_id, record.to_plain(), RECORD)


def find_record(name: str, task: int, key: str) -> RegisteredTask | None:
    """What `keep_record` kept for the newest version of a registered model that is of this task and this run key."""
    with translate_errors():
        client = connect()
        import mlflow

        tags = with_tags({"csc.run_key": key, "csc.task": str(task)})
        found = client.search_model_versions(f"name = '{name}' and {tags}")
        if not found:
            return None
        newest = max(found, key=lambda version: int(version.version))
        where = f"runs:/{newest.run_id}/{RECORD}"
        return RegisteredTask.from_plain(mlflow.artifacts.load_dict(where), where)
