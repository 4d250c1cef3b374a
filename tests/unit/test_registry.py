"""The registry: names that say which run they are of, and models that are what was registered."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from csc.artifacts import RegisteredTask
from csc.errors import BadModel, CscError
from csc.model import fingerprint
from csc.tracking import runs
from csc.tracking.registry import fetch_model, local_model, point_aliases
from tests.tracked import fresh_database
from tests.trained import SCENARIO, Trained, trained

NAME = f"{SCENARIO}-csc"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    uri = fresh_database(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


def stored_weights(folder: Path) -> Path:
    (found,) = (folder / "mlflow-artifacts").rglob("model.safetensors")
    return found


@pytest.mark.slow
def test_a_damaged_model_is_refused_in_one_line_and_put_right_by_register(client: Any, tmp_path: Path):
    task = trained(tmp_path, 1)
    task.register()
    weights = stored_weights(tmp_path)
    weights.write_bytes(b"W" + weights.read_bytes()[1:])
    record = RegisteredTask.read(task.registered)
    assert local_model(record.model) is None  # train then asks the registry
    for uri in (f"models:/{NAME}/1", f"models:/{NAME}@task-01", f"models:/{record.model.model_id}"):
        with pytest.raises(BadModel, match=rf"^{uri}: damaged: its files are not those that were registered .*$"):
            fetch_model(uri, tmp_path / "fetched")
    task.register()
    assert local_model(record.model) is not None
    assert fingerprint(fetch_model(f"models:/{NAME}/1", tmp_path / "fetched")) == record.model.fingerprint


def test_no_more_is_fetched_than_the_model(client: Any, tmp_path: Path):
    trained(tmp_path, 1).register()
    for uri in (f"models:/{NAME}/1", f"models:/{NAME}@task-01"):
        fetched = fetch_model(uri, tmp_path / "fetched")
        assert {path.parent for path in (tmp_path / "fetched").rglob("*") if path.is_file()} == {fetched}


def test_a_missing_file_is_damage_too(client: Any, tmp_path: Path):
    trained(tmp_path, 1).register()
    weights = stored_weights(tmp_path)
    weights.unlink()
    with pytest.raises(BadModel, match="fingerprint none, registered"):
        fetch_model(f"models:/{NAME}/1", tmp_path / "fetched")
    shutil.rmtree(weights.parent)
    with pytest.raises(CscError, match="No such artifact"):
        fetch_model(f"models:/{NAME}/1", tmp_path / "fetched again")


def test_a_version_that_somebody_made_of_our_model_is_compared_too(client: Any, tmp_path: Path):
    model = trained(tmp_path, 1).register()["model"]
    client.create_registered_model("champions")
    client.create_model_version("champions", f"models:/{model['model_id']}", model_id=model["model_id"])
    assert fetch_model("models:/champions/1", tmp_path / "whole").name == "model"
    weights = stored_weights(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadModel, match=r"^models:/champions/1: damaged"):
        fetch_model("models:/champions/1", tmp_path / "fetched")


def last_task(folder: Path, seed: int, **register: float) -> Trained:
    first, last = (trained(folder, task, seed, register=register) for task in (1, 3))
    first.register()
    last.register(first)
    return last


def aliases(client: Any) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model(NAME).aliases.items()}


@pytest.mark.slow
def test_aliases_come_back_to_a_run_that_is_shown_again(client: Any, tmp_path: Path):
    shown_again, other = last_task(tmp_path, 0), last_task(tmp_path, 1)
    assert str(client.get_model_version_by_alias(NAME, "final").version) == "4"
    shown = point_aliases(NAME, runs.run_key(shown_again.card))
    assert (shown.uri, shown.alias) == (f"models:/{NAME}/2", "final")
    assert shown.moved == (
        "task-01 is version 1 again (was 3)",
        "task-03 is version 2 again (was 4)",
        "final is version 2 again (was 4)",
    )
    assert aliases(client) == {"task-01": "1", "task-03": "2", "final": "2"}
    assert point_aliases(NAME, runs.run_key(shown_again.card)).moved == ()
    assert point_aliases(NAME, runs.run_key(other.card)).uri == f"models:/{NAME}/4"
    assert point_aliases(NAME, "of no run").uri == ""


@pytest.mark.slow
def test_names_of_runs_say_which_settings_were_changed(client: Any, tmp_path: Path):
    last_task(tmp_path, 0)
    experiment = client.get_experiment_by_name("csc-digits")
    names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    assert names == {f"{SCENARIO} · csc · train.epochs=2 · seed 0", "task 01", "task 03"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"min_map": 31.0}, "kept back from its aliases: mAP 30.00 is below register.min_map=31"),
        ({"max_drop": 5.0}, "kept back from its aliases: mAP fell by 20.00, more than register.max_drop=5"),
    ],
)
def test_a_model_below_its_limits_is_registered_but_never_final(
    limits: dict[str, float], reason: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good = last_task(tmp_path / "good", 0)
    first = trained(tmp_path / "bad", 1, 1, register=limits, mean_ap=50.0)
    bad = trained(tmp_path / "bad", 3, 1, register=limits)
    first.register()
    bad.register(first)
    assert f"models:/{NAME}/4 ({reason})" in capsys.readouterr().out
    assert aliases(client)["final"] == "2"
    shown = point_aliases(NAME, runs.run_key(bad.card))
    assert (shown.uri, shown.alias, shown.kept_back) == (f"models:/{NAME}/4", "", reason)
    assert aliases(client)["final"] == "2"
    assert reason[1:] in client.get_model_version(NAME, "4").description
    assert runs.run_key(good.card) != runs.run_key(bad.card)


def test_limits_do_not_make_another_run_of_it(tmp_path: Path):
    cards = [trained(tmp_path / str(limit), 1, register={"min_map": limit}).card for limit in (0.0, 9.0)]
    assert runs.run_key(cards[0]) == runs.run_key(cards[1])
