"""MLflow on a real SQLite store: everything once, errors in one line, and KFP's own runs put to use."""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.store.entities import PagedList
from PIL import Image

from csc.artifacts import RegisteredTask
from csc.errors import TrackingError
from csc.report.table import provenance
from csc.steps.ingest import ingest
from csc.steps.report import report
from csc.tracking import calls, queries, runs
from csc.tracking.names import class_metric, path_metric
from csc.tracking.queries import close_runs, ping_server
from csc.tracking.registry import fetch_model, find_registered_task
from csc.tracking.runs import Tracker, finish_scenario
from csc.tracking.server import tracking_uri, without_secrets
from tests.tracked import Plugin, Tracked, fresh_database
from tests.trained import EPOCHS, SCENARIO, Trained, epoch_log, trained

NAME = f"{SCENARIO}-csc"
SETTINGS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store of the test's own, which the code under test uses too."""
    from mlflow.tracking import MlflowClient

    uri = fresh_database(tmp_path)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


def test_two_tasks_leave_a_parent_with_the_curve_and_children_with_lineage(client: Any, tmp_path: Path):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    one = first.register()["model"]
    two = second.register(first)["model"]
    tracked = Tracked(client, first.card)
    (parent,), children = tracked.runs("scenario"), tracked.runs("task")
    assert [one["parent_run_id"], two["parent_run_id"]] == [parent.info.run_id] * 2
    assert [one["run_id"], two["run_id"]] == [child.info.run_id for child in children]
    assert tracked.steps(parent, "mAP") == [1, 2]
    assert parent.data.params["train.epochs"] == str(EPOCHS)
    for number, child in enumerate(children, start=1):
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.parentRunId"] == child.data.tags["csc.scenario_run"] == parent.info.run_id
        assert tracked.steps(child, "train/loss") == [1, 2]
        assert tracked.steps(child, "mAP") == tracked.steps(child, "AP/0") == [number]
        assert len(child.inputs.dataset_inputs) == 2
    assert [[item.model_id for item in child.inputs.model_inputs] for child in children] == [[], [one["model_id"]]]
    outputs = [[item.model_id for item in child.outputs.model_outputs] for child in children]
    assert outputs == [[one["model_id"]], [two["model_id"]]]
    assert str(client.get_model_version_by_alias(NAME, "task-02").version) == two["version"]
    tied = client.get_logged_model(two["model_id"]).metrics
    assert {metric.key: metric.value for metric in tied}["mAP"] == 20.0
    kept = find_registered_task(NAME, 2, runs.run_key(second.card))
    assert kept == RegisteredTask.read(second.registered)


def test_a_run_says_in_what_its_data_are_not_the_benchmark(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1, note="not VOC 2007 as published: train: 6 images")
    task.train()
    task.register()
    run = RegisteredTask.read(task.registered).run
    assert "(not VOC 2007 as published: train: 6 images)" in provenance(run)["data"]


def test_a_second_try_of_every_step_adds_nothing(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    task.register()
    before = Tracked(client, task.card).count()
    task.train()
    task.register()
    assert Tracked(client, task.card).count() == before


def test_register_logs_the_epochs_that_training_could_not(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    tracked = Tracked(client, task.card)
    Tracker(task.card).log_epoch(0, epoch_log(0))
    (child,) = tracked.runs("task")
    assert (child.info.status, tracked.steps(child, "train/loss")) == ("RUNNING", [1])
    task.register()
    (child,) = tracked.runs("task")
    assert (child.info.status, tracked.steps(child, "train/loss")) == ("FINISHED", [1, 2])


CALLS = (
    "log_model_artifacts finalize_logged_model log_outputs log_inputs create_model_version set_registered_model_alias "
    "log_dict update_model_version set_terminated"
)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.split())
def test_a_try_that_died_at_any_call_is_completed_by_the_next(
    call: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mlflow.tracking import MlflowClient
    from mlflow.tracking._model_registry.client import ModelRegistryClient

    def die(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    undisturbed, task = trained(tmp_path, 1, seed=1), trained(tmp_path, 1)
    undisturbed.register()
    with monkeypatch.context() as broken:
        for kind in (MlflowClient, ModelRegistryClient):
            broken.setattr(kind, call, die, raising=False)
        assert "says: No space left on device" in refusal(task.register)
    assert not task.registered.exists()
    task.register()
    assert Tracked(client, task.card).count() == Tracked(client, undisturbed.card).count()


def test_more_classes_than_one_call_may_carry_are_logged_all_the_same(client: Any, tmp_path: Path):
    card, names = trained(tmp_path, 1).card, [str(number) for number in range(1100)]
    Tracker(card).log_task("", {}, dict.fromkeys(names, 50.0), [])
    (child,) = Tracked(client, card).runs("task")
    assert {f"AP/{name}" for name in names} == set(child.data.metrics)


NAMES = ("person (sitting)", "R&B", "c++", "c#", "it's", "👍", "क्षि", "a/../b", "box_x28_", "..")


def test_classes_of_any_name_are_tracked_and_shown_as_they_were_written(client: Any, tmp_path: Path):
    task = trained(tmp_path, 3, classes=NAMES)
    task.register()
    (child,) = Tracked(client, task.card).runs("task")
    logged = {key.removeprefix("AP/") for key in child.data.metrics if key.startswith("AP/")}
    assert {name_of(key) for key in logged} == set(NAMES)
    assert "person _x28_sitting_x29_" in logged
    assert set(RegisteredTask.read(task.registered).run.last.metrics.AP) == set(NAMES)


def name_of(key: str) -> str:
    """The class that a key is of."""
    return re.sub("_x([0-9A-F]+)_", lambda code: chr(int(code[1], 16)), key)


@given(st.text(min_size=1, max_size=40) | st.text("_x28 .(", min_size=1, max_size=12))
def test_the_key_of_a_class_is_one_that_mlflow_takes_and_leads_back_to_the_name(name: str):
    from mlflow.utils.validation import _validate_metric_name

    key = class_metric("AP", name)
    _validate_metric_name(key)
    assert len(key) <= 250
    assert name_of(key.removeprefix("AP/")) == name


def test_keys_of_long_names_are_cut_and_differ_all_the_same():
    names = ["(" * 300, "(" * 301, "a" * 247, "a" * 248]
    keys = {class_metric("AP", name) for name in names}
    assert len(keys) == len(names)
    assert max(map(len, keys)) == 250


def test_rows_of_a_study_that_differ_in_one_sign_have_keys_of_their_own():
    rows = ["A+B", "A*B", "A/B", "a" * 300, "a" * 301]
    keys = {path_metric(f"voc-b0c4/{row}/last_mAP") for row in rows}
    assert len(keys) == len(rows)
    assert max(map(len, keys)) == 250


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_address_is_refused_and_makes_no_database(
    empty: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    task, here = trained(tmp_path, 1), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty)
    for action in (
        task.register,
        ping_server,
        lambda: close_runs(["key"], "FAILED"),
        lambda: ingest("digits-b0c2", "data"),
    ):
        assert refusal(action).startswith("MLFLOW_TRACKING_URI is empty; set it to the address of a tracking server")
    assert list(here.iterdir()) == []


def test_without_an_address_runs_go_to_a_database_in_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_folder_whose_name_has_an_at_sign_is_printed_whole(monkeypatch: pytest.MonkeyPatch):
    uri = "sqlite:////home/me@corp/work/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert without_secrets(uri) == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:12/3@host")  # a password that no address may have
    assert without_secrets("http://me:12/3@host") == "http://host"


@dataclass
class Unreliable:
    """Something to make, whose making may fail before or after the deed."""

    failures: list[str]
    made: int = 0

    def find(self) -> str | None:
        assert os.environ.get(calls.RETRIES) == "5"
        return "found" if self.made else None

    def make(self) -> str:
        from mlflow.exceptions import MlflowException

        assert os.environ[calls.RETRIES] == "0"
        failure = self.failures.pop(0) if self.failures else ""
        self.made += failure != "before"
        if failure:
            raise MlflowException("no answer")
        return "made"


@pytest.mark.parametrize(
    ("failures", "answer"), [([], "made"), (["before"], "made"), (["after"], "found"), (["before"] * 2, "made")]
)
def test_what_is_made_is_made_once_whatever_becomes_of_the_answers(
    failures: list[str], answer: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(calls.RETRIES, "5")
    thing = Unreliable(failures)
    assert calls.find_or_create(thing.find, thing.make) == answer
    assert thing.made == 1
    assert os.environ[calls.RETRIES] == "5"
    assert calls.find_or_create(thing.find, thing.make) == "found"


def test_of_what_two_runs_create_at_once_the_first_stays(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def blind(find: Callable[[], Any], create: Callable[[], Any], settle: Any = None) -> Any:
        """Look only after creating, as when somebody else creates it in between."""
        looks = iter([lambda: None]) if settle else iter(())
        return calls.find_or_create(lambda: next(looks, find)(), create, settle)

    one = trained(tmp_path / "here", 1)
    one.train()
    one.register()
    expected = Tracked(client, one.card).count()
    for module in ("runs", "registry"):
        monkeypatch.setattr(f"csc.tracking.{module}.find_or_create", blind)
    other = trained(tmp_path / "there", 1)
    other.train()
    assert other.register()["model"]["version"] == "1"
    assert Tracked(client, one.card).count() == expected


def test_making_something_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch):
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv(calls.RETRIES, "5")
    thing = Unreliable(["before"] * 9)
    with pytest.raises(MlflowException):
        calls.find_or_create(thing.find, thing.make)
    assert (len(thing.failures), thing.made) == (9 - calls.TRIES, 0)


def test_a_refusal_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    from mlflow.exceptions import MlflowException

    monkeypatch.delenv(calls.RETRIES, raising=False)

    tries: list[int] = []

    def refused() -> str:
        tries.append(1)
        raise MlflowException.invalid_parameter_value("no")

    with pytest.raises(MlflowException):
        calls.find_or_create(lambda: None, refused)
    assert len(tries) == 1
    assert calls.RETRIES not in os.environ


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address with a password in it, where nobody answers."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://anna:hunter2@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token-of-anna")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    return f"http://127.0.0.1:{port}"


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(TrackingError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for secret in ("hunter2", "anna", "token-of"):
        assert secret not in message
    assert caught.value.__cause__ is None  # which would be printed, with the address as it was given
    return message


def test_a_server_that_does_not_answer_is_reported_in_one_line_without_secrets(away: str, tmp_path: Path):
    task = trained(tmp_path, 1)
    for action in (
        task.register,
        ping_server,
        lambda: Tracker(task.card).log_inputs({}, None),
        lambda: fetch_model("models:/some@final", tmp_path / "model"),
        lambda: finish_scenario("0" * 32, {"mAP": 1.0}, 1, {"report.html": "page"}, "note"),
        lambda: find_registered_task(NAME, 1, "key"),
    ):
        message = refusal(action)
        assert message.startswith(f"MLflow at {away} does not answer (connection refused); check MLFLOW_TRACKING_URI")
        assert message.endswith("repeat the command: nothing finished is lost")
    assert not task.registered.exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("HTTPSConnectionPool(host='x'): too many 503 error responses", "answers only with errors (503)"),
        ("failed with exception: Failed to resolve 'mlflow'", "does not answer (no such host)"),
        ("Read timed out.", "does not answer (timed out)"),
        ("('Connection aborted.', RemoteDisconnected('Remote end closed'))", "does not answer (the connection broke)"),
        ("failed with error code 403 != 200. Response body: 'Invalid Host header - x'", "--allowed-hosts"),
        (
            "failed with error code 401 != 200. Response body: 'You are not'",
            "does not let us in; check MLFLOW_TRACKING_USERNAME",
        ),
        ("first\n  second http://anna:hunter2@host/x token-of-anna", "says: first second http://host/x ***"),
    ],
)
def test_what_mlflow_says_becomes_what_it_means(said: str, message: str, away: str):
    from mlflow.exceptions import MlflowException

    def fail() -> None:
        with calls.translate_errors():
            raise MlflowException(said)

    assert message in refusal(fail)


def test_a_mistake_of_ours_is_not_blamed_on_the_server(away: str):
    with pytest.raises(KeyError), calls.translate_errors():
        raise KeyError("ours")


def test_a_database_that_cannot_be_opened_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    (tmp_path / "file").write_text("")
    assert f"MLflow at sqlite:///{tmp_path}/file/mlflow.db says: " in refusal(ping_server)


def test_training_goes_on_without_its_server_and_says_so_once(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    task = trained(tmp_path, 1)
    tracker = Tracker(task.card)
    tracker.log_epoch(0, epoch_log(0))
    calls: list[int] = []

    def gone(*_: object, **__: object) -> None:
        calls.append(1)
        raise ConnectionError("Connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(tracker.client, "log_batch", gone)
        for epoch in (1, 2, 3):
            tracker.log_epoch(epoch, epoch_log(epoch))
    assert len(calls) == 1  # it is not waited for again after each epoch
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "does not answer" in line]
    assert line.startswith("task 1/3: MLflow at sqlite:///")
    assert line.endswith("training goes on without it")
    tracked = Tracked(client, task.card)
    (child,) = tracked.runs("task")
    assert tracked.steps(child, "train/loss") == [1]


@pytest.fixture
def plugin(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    experiment = client.create_experiment("KFP-Default", artifact_location=(tmp_path / "artifacts").as_uri())
    played = Plugin(client, experiment, monkeypatch)
    played.start_pipeline("digits-b0c4 by hand")
    yield played
    assert client.get_experiment_by_name("csc-digits") is None  # all of it is where the plugin looks for it


def run_task(plugin: Plugin, task: Trained, prior: Trained | None = None) -> tuple[str, str]:
    """The two steps of a task that track, each with its own run from the plugin; returns these."""
    train = plugin.start_step(task.card.task, "train")
    task.train()
    plugin.end_step(train, config='"{}"', **{"train.epochs": '"not ours"'})
    register = plugin.start_step(task.card.task, "register")
    task.register(prior)
    plugin.end_step(register, model='"x"')
    return train.info.run_id, register.info.run_id


@pytest.mark.slow
def test_the_run_of_the_train_step_becomes_the_tasks_run(plugin: Plugin, client: Any, tmp_path: Path):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    taken = [run_task(plugin, first), run_task(plugin, second, first)]
    tracked = Tracked(client, first.card, "KFP-Default")
    (scenario,), tasks, steps = (tracked.runs(role) for role in ("scenario", "task", "step"))
    assert [(task.info.run_id, step.info.run_id) for task, step in zip(tasks, steps, strict=True)] == taken
    assert scenario.data.tags["mlflow.parentRunId"] == plugin.pipeline.info.run_id
    assert scenario.data.params["train.epochs"] == str(EPOCHS)
    assert tracked.steps(scenario, "mAP") == [1, 2]
    for number, (task, step) in enumerate(zip(tasks, steps, strict=True), start=1):
        assert task.data.tags["csc.scenario_run"] == scenario.info.run_id
        assert task.data.tags["csc.scenario"] == SCENARIO
        assert task.data.tags["mlflow.parentRunId"] != scenario.info.run_id  # the plugin's tree is left as it is
        assert tracked.steps(task, "train/loss") == [1, 2]
        assert tracked.steps(task, "mAP") == [number]
        assert step.data.tags["csc.task_run"] == task.info.run_id
        assert not step.data.metrics
    assert tracked.versions() == [1, 2]
    assert find_registered_task(NAME, 2, runs.run_key(second.card)) is not None


@pytest.mark.slow
def test_a_retried_step_finds_its_task_again(plugin: Plugin, client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    runs = run_task(plugin, task)
    tracked = Tracked(client, task.card, "KFP-Default")
    before = tracked.count()
    for run_id in runs:
        client.update_run(run_id, "RUNNING")  # as the API server reopens it
        plugin.inject(client.get_run(run_id))
        task.register()
        client.set_terminated(run_id)
    assert tracked.count() == before


@pytest.mark.slow
def test_another_pipeline_goes_on_with_the_runs_of_the_one_before(plugin: Plugin, client: Any, tmp_path: Path):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    run_task(plugin, first)
    tracked = Tracked(client, first.card, "KFP-Default")
    (scenario,) = tracked.runs("scenario")
    plugin.start_pipeline("digits-b0c4, submitted again")
    run_task(plugin, first)
    run_task(plugin, second, first)
    assert [run.info.run_id for run in tracked.runs("scenario")] == [scenario.info.run_id]
    tasks = tracked.runs("task")
    assert [tracked.steps(task, "train/loss") for task in tasks] == [[1, 2], [1, 2]]
    assert tracked.steps(scenario, "mAP") == tracked.versions() == [1, 2]


@pytest.mark.slow
def test_two_scenario_runs_in_one_pipeline_keep_apart(plugin: Plugin, client: Any, tmp_path: Path):
    for seed in (0, 1):
        task = trained(tmp_path, 1, seed)
        run_task(plugin, task)
        tracked = Tracked(client, task.card, "KFP-Default")
        (scenario,), (child,) = tracked.runs("scenario"), tracked.runs("task")
        assert scenario.data.params["seed"] == str(seed)
        assert tracked.steps(scenario, "mAP") == tracked.steps(child, "mAP") == [1]


@pytest.mark.slow
def test_one_run_in_the_environment_of_all_tasks_is_used_for_the_first_only(
    plugin: Plugin, client: Any, tmp_path: Path
):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    given = plugin.start_step(1, "everything")
    first.register()
    second.register(first)
    tracked = Tracked(client, first.card, "KFP-Default")
    tasks = tracked.runs("task")
    assert [task.data.tags["csc.task"] for task in tasks] == ["1", "2"]
    assert tasks[0].info.run_id == given.info.run_id
    assert tracked.steps(tasks[0], "mAP") == [1]


def test_a_run_of_another_server_is_reported_and_left_alone(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MLFLOW_RUN_ID", "f" * 32)
    task = trained(tmp_path, 1)
    task.register()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "MLFLOW_RUN_ID" in line]
    assert line.startswith("task 1/3: MLflow at sqlite:///")
    assert Tracked(client, task.card).count()["runs"] == [1, 1]


@pytest.mark.slow
def test_pages_say_what_they_show(client: Any, tmp_path: Path):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    first.register()
    second.register(first)
    report(str(second.registered), str(tmp_path / "page.html"), str(tmp_path / "table.md"))
    tracked = Tracked(client, first.card)
    (parent,), (_, child) = tracked.runs("scenario"), tracked.runs("task")
    experiment = client.get_experiment(parent.info.experiment_id)
    assert "**digits**" in experiment.tags["mlflow.note.content"]
    note = parent.data.tags["mlflow.note.content"]
    for part in ("**digits-b0c4** by **csc**, seed 0", "`train.epochs=2`", f"csc predict models:/{NAME}/2", "| mAP"):
        assert part in note
    version = client.get_model_version(NAME, "2")
    for text in (child.data.tags["mlflow.note.content"], version.description):
        assert f"It started from [models:/{NAME}/1](#/models/{NAME}/versions/1)." in text
        assert "**mAP 20.0 · CF1 21.0" in text
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert files == {"config.yaml", "images", "report.html", "results.json"}
    (data,) = [item.dataset for item in parent.inputs.dataset_inputs]
    assert (data.name, data.digest) == ("digits", "d" * 16)
    models = [RegisteredTask.read(task.registered).model.model_id for task in (first, second)]
    assert {item.model_id for item in parent.outputs.model_outputs} == set(models)
    assert parent.data.metrics["last_mAP"] == 20.0
    assert parent.data.tags["csc.settings"] == "train.epochs=2"
    assert parent.data.tags["mlflow.user"]


def test_figures_are_images_of_the_scenarios_run_and_come_once(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    task.register()
    for _ in range(2):
        report(str(task.registered), str(tmp_path / "page.html"), str(tmp_path / "table.md"))
    (parent,) = Tracked(client, task.card).runs("scenario")
    assert parent.data.tags["mlflow.loggedImages"] == "True"
    paths = [item.path for item in client.list_artifacts(parent.info.run_id, "images")]
    begun = parent.info.start_time
    for figure in ("mAP by task", "AP by task"):  # as MLflow's pages expect it: an image, and a smaller copy of it
        found = [path for path in paths if path.startswith(f"images/figures~{figure}+step+1+timestamp+{begun}+")]
        assert [path.rpartition(".")[2] for path in sorted(found)] == ["webp", "png"]
        for path in found:
            image = Image.open(client.download_artifacts(parent.info.run_id, path, str(tmp_path)))
            assert len(image.convert("RGB").getcolors(1 << 20)) > 2
    assert len(paths) == 4


def test_an_epoch_says_how_busy_the_machine_was_and_a_resumed_training_adds_no_point_twice(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    for epochs in ((0,), (0, 1)):  # the second try begins with an epoch that is logged already
        tracker = Tracker(task.card)
        with tracker.measuring():
            for epoch in epochs:
                tracker.log_epoch(epoch, epoch_log(epoch))
    tracked = Tracked(client, task.card)
    (child,) = tracked.runs("task")
    for number in ("cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_available_megabytes"):
        assert tracked.steps(child, f"system/{number}") == [1, 2]
    assert child.data.metrics["system/system_memory_usage_megabytes"] > 10
    assert "csc-usage" not in [thread.name for thread in threading.enumerate()]


def test_terms_of_the_loss_are_named_as_such_and_every_view_has_its_digest(client: Any, tmp_path: Path):
    first, second = trained(tmp_path, 1), trained(tmp_path, 2)
    for task, prior in ((first, None), (second, first)):
        task.train()
        task.register(prior)
    children = Tracked(client, first.card).runs("task")
    assert {key for key in children[0].data.metrics if key.startswith("train/")} == {
        *("train/loss", "train/loss_ce", "train/loss_H", "train/images_per_second")
    }
    inputs = [item.dataset for child in children for item in child.inputs.dataset_inputs]
    assert len(inputs) == len({item.digest for item in inputs}) == 4  # train and register agree on it


@pytest.mark.slow
def test_two_processes_that_share_a_server_log_every_point_once(client: Any, tmp_path: Path):
    """The same run twice at once, as on two machines: each has looked before the other has logged."""
    task = trained(tmp_path, 1)
    one, two = Tracker(task.card), Tracker(task.card)
    for epoch in range(EPOCHS):
        for tracker in (one, two):
            tracker.log_epoch(epoch, epoch_log(epoch))
    task.register()
    model = RegisteredTask.read(task.registered).model
    for tracker in (one, two):
        tracker.log_task(model.model_id, {"mAP": 10.0}, {"0": 50.0}, [epoch_log(epoch) for epoch in range(EPOCHS)])
        tracker.log_scenario({"mAP": 10.0}, "images")
    for _ in range(2):
        report(str(task.registered), str(tmp_path / "page.html"), str(tmp_path / "table.md"))
    tracked = Tracked(client, task.card)
    for run in [*tracked.runs("scenario"), *tracked.runs("task")]:
        for key in run.data.metrics:
            steps = tracked.steps(run, key)
            assert len(steps) == len(set(steps)), key


def test_a_server_that_gives_out_the_same_page_without_end_is_refused(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="1"), data=None)
    client = SimpleNamespace(
        search_experiments=lambda: [run.info], search_runs=lambda *_, **__: PagedList([run], token="again")
    )
    with pytest.raises(TrackingError, match="the same page of runs without end"):
        list(queries._all_pages(client))


@pytest.mark.parametrize("text", [" ", "one", "-1", "1.0", "9" * 12, "²"])
def test_a_tag_that_is_no_number_is_one_line(text):
    with pytest.raises(
        TrackingError, match=r"^MLflow has a run or version with the tag csc\.tasks=.*; expected a number$"
    ):
        queries.number_of("tag csc.tasks", text)
