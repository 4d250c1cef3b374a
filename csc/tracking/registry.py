"""Models in MLflow: logged with their task's run, registered as versions, and fetched again.

A model is logged with the prior model as its input, and registered under one name per (scenario, method) with aliases
`task-01` … and `final`. Models and versions are found again by the fingerprint of the model folder, so a step that is
tried again adds none, and what is fetched is compared with it, so no damaged model is used.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from csc.artifacts import RegisteredTask, RegisteredVersion
from csc.errors import BadModel
from csc.model import fingerprint
from csc.tracking.calls import connected, find_or_create, translate_errors
from csc.tracking.files import download
from csc.tracking.names import model_name
from csc.tracking.queries import number_of, tag_filter, task_of
from csc.tracking.runs import Tracker

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

__all__ = [
    "LastVersion",
    "describe_version",
    "fetch_model",
    "find_registered_task",
    "keep_registered_task",
    "load_registered_task",
    "local_model",
    "log_model",
    "model_names",
    "point_aliases",
    "register_version",
]

REGISTERED = "registered.json"
_MODEL = "data/model"  # the folder of the model in its package
FINGERPRINT, KEPT_BACK = "csc.fingerprint", "csc.kept_back"  # tags of versions


def local_model(registered: RegisteredVersion) -> Path | None:
    """The folder of a registered model whose files are on this machine, unchanged; it takes no MLflow to read them."""
    folder = _on_this_machine(registered.location)
    return folder if folder is not None and _fingerprint(folder) == registered.fingerprint else None


def _on_this_machine(location: str) -> Path | None:
    """The model folder in a package of MLflow whose files are on this machine."""
    parts = urlsplit(location)
    folder = Path(unquote(parts.path)) / _MODEL
    return folder if parts.scheme in ("", "file") and (folder / "model.json").is_file() else None


def _fingerprint(folder: Path) -> str:
    """The fingerprint of a model folder; none of one that misses a file."""
    try:
        return fingerprint(folder)
    except OSError:
        return ""


def fetch_model(uri: str, folder: Path | None = None) -> Path:
    """Download a registered model and return the folder with its weights and card; damaged ones are refused.

    `uri` may also be a local folder that holds a model. Without `folder`, the files go to a temporary one.
    """
    if not uri.startswith("models:/"):
        return Path(uri)
    with connected() as client:
        import mlflow

        source, expected = _find_package(client, uri)
        # Of our own packages only the model folder: they have many files, and each is a request that may fail.
        source += f"/{_MODEL}" if expected else ""
        local = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder) if folder else None))
    if not expected:
        if not (local / _MODEL / "model.json").is_file():
            raise BadModel(f"{uri}: not a model of this project (no {_MODEL}/model.json in it)")
        return local / _MODEL
    if (found := _fingerprint(local)) != expected:
        raise BadModel(
            f"{uri}: damaged: its files are not those that were registered (fingerprint {found[:12] or 'none'}, "
            f"registered {expected[:12]}); put them back from a copy, or delete the version and run its task again"
        )
    return local


def _find_package(client: "MlflowClient", uri: str) -> tuple[str, str]:
    """Where the package of a model or version is, and the fingerprint of the model in it, if `register` put it there.

    A version of a logged model is fetched as that, also if somebody else made the version: for a version MLflow would
    read all versions of its name.
    """
    from mlflow.store.artifact.utils.models import get_model_name_and_version

    named = get_model_name_and_version(client, uri)
    if len(named) == 1:  # the id of a logged model
        model = client.get_logged_model(*named)
        return model.artifact_location, str(model.tags.get(FINGERPRINT, ""))
    version = client.get_model_version(*named)
    if str(version.source).startswith("models:/"):
        source, of_logged = _find_package(client, version.source)
        return source, str(version.tags.get(FINGERPRINT, of_logged))
    return uri, str(version.tags.get(FINGERPRINT, ""))


def _registry(client: "MlflowClient") -> Any:
    """The registry's own client, which `client` calls.

    The methods of `client` first ask whether a model is a prompt, and MLflow reads all versions of the model to answer.
    """
    return client._get_registry_client()


def log_model(tracker: Tracker, package: Path, model_fingerprint: str) -> "LoggedModel":
    """Log a package of `package_model` as output of the task's run and the scenario's; again, it changes nothing."""
    client, card = tracker.client, tracker.card
    oldest = [{"field_name": "creation_timestamp", "ascending": True}]
    query = tag_filter({FINGERPRINT: model_fingerprint})

    def find() -> "LoggedModel | None":
        found = client.search_logged_models([tracker.experiment_id], query, max_results=1, order_by=oldest)
        return next(iter(found), None)

    def create() -> "LoggedModel":
        name = f"{model_name(card.scenario, card.method)}-task-{card.task:02d}"
        tags = {FINGERPRINT: model_fingerprint, "csc.run_key": tracker.key, "csc.task": str(card.task)}
        params = {key: str(value) for key, value in card.resolved_config().flat().items()}
        return client.create_logged_model(tracker.experiment_id, name, tracker.task_run.info.run_id, tags, params)

    def keep_first(made: "LoggedModel", first: "LoggedModel") -> None:
        if made.model_id != first.model_id:
            client.delete_logged_model(made.model_id)

    with translate_errors():
        model = find_or_create(find, create, keep_first)
        # New, or left behind by a try that died while uploading, or damaged since on this machine.
        stored = _on_this_machine(model.artifact_location)
        if str(model.status) != "READY" or (stored is not None and _fingerprint(stored) != model_fingerprint):
            client.log_model_artifacts(model.model_id, str(package))
            model = client.finalize_logged_model(model.model_id, "READY")
        for run_id in (tracker.task_run.info.run_id, tracker.scenario_run_id):
            _log_output(tracker, run_id, model.model_id)
        return model


def _log_output(tracker: Tracker, run_id: str, model_id: str) -> None:
    """Note a model as output of a run; to note it twice would be an error."""
    from mlflow.entities import LoggedModelOutput

    def noted() -> str | None:
        outputs = tracker.client.get_run(run_id).outputs
        return model_id if outputs and model_id in [item.model_id for item in outputs.model_outputs] else None

    def note() -> str:
        tracker.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, tracker.card.task)])
        return model_id

    find_or_create(noted, note)


def register_version(
    tracker: Tracker, model: "LoggedModel", model_fingerprint: str, name: str, kept_back: str = ""
) -> RegisteredVersion:
    """Make a logged model the task's version of the registered model `name`; a second call changes nothing.

    Aliases come last; none names a version that is `kept_back`, which says why.
    """
    card, client = tracker.card, tracker.client
    with translate_errors():
        number = _version(tracker, name, model.model_id, model_fingerprint)
        if kept_back:
            client.set_model_version_tag(name, number, KEPT_BACK, kept_back)
        else:
            for alias in _aliases(card.task, card.tasks):
                _registry(client).set_registered_model_alias(name, alias, number)
    runs = tracker.task_run.info.run_id, tracker.scenario_run_id
    return RegisteredVersion(name, number, model.model_id, model_fingerprint, *runs, location=model.artifact_location)


def describe_version(tracker: Tracker, registered: RegisteredVersion, note: str) -> None:
    """Say on a version's page what it is."""
    with translate_errors():
        _registry(tracker.client).update_model_version(registered.name, registered.version, note)


def _aliases(task: int, tasks: int) -> list[str]:
    return [f"task-{task:02d}", "final"] if task == tasks else [f"task-{task:02d}"]


def _version(tracker: Tracker, name: str, model_id: str, model_fingerprint: str) -> str:
    """The number of the model's version below a name, found or created; so is the name."""
    from mlflow.exceptions import MlflowException

    card, client = tracker.card, tracker.client
    tags = {
        FINGERPRINT: model_fingerprint,
        "csc.scenario": card.scenario,
        "csc.task": str(card.task),
        "csc.tasks": str(card.tasks),
        "csc.seed": str(card.config["seed"]),
        "csc.classes_seen": str(len(card.classes)),
        "csc.code_version": card.code_version,
        "csc.run_key": tracker.key,
    }

    def find() -> str | None:
        found = client.search_model_versions(f"name = '{name}' and {tag_filter({FINGERPRINT: model_fingerprint})}")
        return min((str(version.version) for version in found), key=int, default=None)

    def create() -> str:
        source, run_id = f"models:/{model_id}", tracker.task_run.info.run_id
        return str(client.create_model_version(name, source, run_id, tags, model_id=model_id).version)

    def keep_first(made: str, first: str) -> None:
        if made != first:
            client.delete_model_version(name, made)

    try:
        return find_or_create(find, create, keep_first)
    except MlflowException as error:
        # Users who are not the administrator are told that they may not, where there is nothing yet.
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
            raise
    with contextlib.suppress(MlflowException):  # another run may have created it by now; if not, the next line fails
        client.create_registered_model(name, tags={"csc.scenario": card.scenario, "csc.method": card.method})
    return find_or_create(find, create, keep_first)


@dataclass(frozen=True)
class LastVersion:
    """The version of a finished run's last task."""

    uri: str = ""  # its address; empty if there is none
    alias: str = ""  # the more lasting one; empty if it was kept back
    kept_back: str = ""  # why; empty if it was not
    moved: tuple[str, ...] = ()  # a line about each alias that named another run's version


def model_names(key: str) -> list[str]:
    """The registered models with versions of a run; an extension's are below the name of the model that it extends."""
    with connected() as client:
        return sorted({version.name for version in client.search_model_versions(tag_filter({"csc.run_key": key}))})


def point_aliases(name: str, key: str) -> LastVersion:
    """Let the aliases of a registered model name the versions of a finished run, if another run has moved them."""
    with connected() as client:
        versions = _versions_by_task(client, name, {"csc.run_key": key})
        if not versions:
            return LastVersion()
        # Found by a search, because a model that is asked for by its name comes with all its versions.
        models = client.search_registered_models(f"name = '{name}'", max_results=1)
        before, moved = models[0].aliases if models else {}, []
        for task, version in versions.items():
            for alias in _aliases_of(task, version):
                if str(before.get(alias)) != str(version.version):
                    _registry(client).set_registered_model_alias(name, alias, version.version)
                    moved.append(f"{alias} is version {version.version} again (was {before.get(alias, 'none')})")
    last = versions[max(versions)]
    aliases, kept_back = _aliases_of(max(versions), last), last.tags.get(KEPT_BACK, "")
    return LastVersion(f"models:/{name}/{last.version}", aliases[-1] if aliases else "", kept_back, tuple(moved))


def _aliases_of(task: int, version: "ModelVersion") -> list[str]:
    """The aliases that a version should have; none if it was kept back."""
    tasks = number_of("tag csc.tasks", version.tags.get("csc.tasks", "0"))
    return [] if KEPT_BACK in version.tags else _aliases(task, tasks)


def _versions_by_task(client: "MlflowClient", name: str, tags: Mapping[str, str]) -> "dict[int, ModelVersion]":
    """The newest version with these tags of each task, in the order of tasks."""
    found = client.search_model_versions(f"name = '{name}' and {tag_filter(tags)}")
    numbered = {(task_of(version.tags), number_of("version", str(version.version))): version for version in found}
    return {task: version for (task, _), version in sorted(numbered.items(), key=lambda item: item[0])}


def keep_registered_task(tracker: Tracker, task: RegisteredTask) -> None:
    """Keep `registered.json` with the task's run, for a pipeline that begins with the next task."""
    with translate_errors(), tempfile.TemporaryDirectory(prefix="csc-registered-") as folder:
        task.write(Path(folder, REGISTERED))
        tracker.client.log_artifact(tracker.task_run.info.run_id, str(Path(folder, REGISTERED)))


def find_registered_task(name: str, task: int, key: str) -> RegisteredTask | None:
    """What `keep_registered_task` kept for the newest version of a model that is of this task and this run key."""
    with connected() as client:
        version = _versions_by_task(client, name, {"csc.run_key": key, "csc.task": str(task)}).get(task)
        return None if version is None else load_registered_task(client, version.run_id)


def load_registered_task(client: "MlflowClient", run_id: str) -> RegisteredTask:
    """What `keep_registered_task` kept with the run of a task; errors are MLflow's own."""
    with tempfile.TemporaryDirectory(prefix="csc-registered-") as folder:
        file = download(client.get_run(run_id), REGISTERED, Path(folder))
        return RegisteredTask.read(file, f"runs:/{run_id}/{REGISTERED}")
