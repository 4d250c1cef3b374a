"""prior: the record of a registered task comes back from MLflow as register wrote it."""

import json
import subprocess
import sys

import pytest

from csc.artifacts import Origin, RegisteredTask, RegisteredVersion
from csc.config import resolve
from csc.errors import BadModel, CscError
from csc.model import ModelCard
from csc.steps.prior import prior
from csc.tracking.registry import keep_registered_task, log_model, register_version
from csc.tracking.runs import Tracker, run_key
from tests.tracked import fresh_database
from tests.trained import record

SCENARIO, DATA, CODE = "digits-b0c4", "d" * 64, "0.1.0+abc"
ORIGIN = Origin("/somewhere", DATA, CODE).to_json()


def card(task, **overrides):
    config = resolve("digits", overrides)
    return ModelCard(
        method=config.method,
        scenario=SCENARIO,
        task=task,
        tasks=3,
        classes=tuple("0123"),
        new=tuple("0123"),
        config=json.loads(config.to_json()),
        initialisation={"text": "scratch"},
        mean=(),
        std=(),
        data_fingerprint=DATA,
        prior_fingerprint="",
        code_version=CODE,
    )


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """A database with versions of tasks 1 and 2 of one run, and of task 1 of another seed; each with its record."""
    folder = tmp_path_factory.mktemp("registry")
    (folder / "package").mkdir()
    (folder / "package" / "MLmodel").write_text("{}")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MLFLOW_TRACKING_URI", fresh_database(folder))
        for mark, made in {"a": card(1), "b": card(2), "c": card(1, seed=1), "d": card(2)}.items():
            tracker = Tracker(made)
            registered = register_version(
                tracker, log_model(tracker, folder / "package", mark), mark, "digits-b0c4-csc"
            )
            keep_registered_task(tracker, record(registered))
        yield folder


@pytest.fixture
def found(registry, tmp_path, monkeypatch):
    """What prior writes for a task of a run with these overrides."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{registry}/mlflow.db")

    def look(task, origin=ORIGIN, **overrides):
        prior(origin, SCENARIO, resolve("digits", overrides).to_json(), task, str(tmp_path / "registered"))
        return json.loads((tmp_path / "registered").read_text())

    return look


def test_the_key_is_that_of_the_models_own_run():
    assert run_key(card(1)) == resolve("digits", {}).fingerprint(SCENARIO, DATA, CODE)


def test_the_record_comes_back_as_it_was_kept(found, tmp_path, capsys):
    kept = found(1)
    assert RegisteredTask.read(tmp_path / "registered") == record(RegisteredVersion(**kept["model"]))
    assert (kept["model"]["version"], kept["model"]["fingerprint"]) == ("1", "a")
    assert capsys.readouterr().out == "task 1: continues models:/digits-b0c4-csc/1\n"


def test_of_several_versions_of_a_task_the_newest_is_found(found):
    model = found(2)["model"]
    assert (model["version"], model["fingerprint"]) == ("4", "d")


def test_the_seed_tells_runs_apart(found):
    assert found(1, seed=1)["model"]["fingerprint"] == "c"


def test_who_does_the_work_does_not_matter(found):
    assert found(1, train={"workers": 0})["model"]["fingerprint"] == "a"


@pytest.mark.parametrize(
    ("task", "origin", "overrides"),
    [
        (3, ORIGIN, {}),
        (2, ORIGIN, {"seed": 1}),
        (1, ORIGIN, {"train": {"epochs": 3}}),
        (1, ORIGIN, {"method": "lwf"}),
        (1, Origin("/somewhere", "e" * 64, CODE).to_json(), {}),
        (1, Origin("/somewhere", DATA, "0.1.0+def").to_json(), {}),
    ],
    ids=["task", "seed", "settings", "method", "data", "code"],
)
def test_what_is_not_there_is_one_line_with_what_was_looked_for(found, tmp_path, task, origin, overrides):
    with pytest.raises(BadModel) as error:
        found(task, origin, **overrides)
    line = str(error.value)
    asked = Origin.from_json(origin)
    for word in (
        f"digits-b0c4-{overrides.get('method', 'csc')}",
        f"task {task}",
        f"seed {overrides.get('seed', 0)}",
        asked.fingerprint[:12],
        asked.code,
    ):
        assert word in line
    assert not (tmp_path / "registered").exists()


def test_a_version_whose_record_is_lost_is_one_line_too(found, registry):
    for file in registry.rglob("registered.json"):
        if '"c"' in file.read_text():
            file.unlink()
    with pytest.raises(CscError, match="MLflow at "):
        found(1, seed=1)


def test_the_step_loads_no_torch():
    code = "import csc.steps.prior, sys; assert not {'torch', 'mlflow', 'kfp'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
