"""The pipeline of `csc extend`: a later task of a scenario that begins with a registered model."""

import json
from pathlib import Path

import pytest
import yaml

from csc.config import resolve
from csc.data.ingest.coco import ingest_coco
from csc.pipelines.extension import compile_extension
from csc.scenario import Scenario
from tests.builders import make_coco
from tests.kfp_server import parse_strictly
from tests.tracked import fresh_database
from tests.trained import trained

pytest_plugins = ["tests.cluster"]

LATER = Scenario.parse("digits-b0c4+4")


@pytest.mark.parametrize("tests_old", [False, True])
@pytest.mark.parametrize("on_cluster", [False, True])
def test_an_extension_has_the_steps_of_one_task(tmp_path: Path, tests_old: bool, on_cluster: bool):
    file = tmp_path / "extension.yaml"
    compile_extension(LATER, 4, resolve("digits"), "f" * 64, file, tests_old, on_cluster=on_cluster)
    documents = list(yaml.load_all(file.read_text(), yaml.CSafeLoader))
    parse_strictly(documents)
    (task,) = [one for one in documents[0]["components"].values() if "split" in _inputs(one) and "dag" in one]
    old = {"build-dataset-2", "evaluate-2", "log-old-classes"} if tests_old else set()
    assert task["dag"]["tasks"].keys() == {"build-dataset", "train", "evaluate", "register"} | old
    assert all(one["description"] for one in documents[0]["root"]["inputDefinitions"]["parameters"].values())
    closing = [one for one in documents[0]["root"]["dag"]["tasks"].values() if "finish" in one["taskInfo"]["name"]]
    assert [one["inputs"]["parameters"]["extended"] for one in closing] == (
        [{"runtimeValue": {"constant": "f" * 64}}] if on_cluster else []
    )


def _inputs(component: dict) -> dict:
    return component.get("inputDefinitions", {}).get("artifacts", {})


@pytest.mark.slow
def test_an_extension_is_submitted_with_the_exact_version_and_the_settings_of_the_model(
    machine: None, server, csc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path / "work"))
    trained(tmp_path, 3, seed=7).register()
    data = ingest_coco(make_coco(tmp_path / "coco"), tmp_path / "animals", "animals").uri
    words = ("extend", "models:/digits-b0c4-csc@final", "--data", data, "--submit")
    access = ("--profile", "mine.yaml", "--host", server.host, "--token-env", "MY_TOKEN")
    monkeypatch.setattr("csc.cli.cluster_doctor.retry_warning", lambda *_: "the cluster tries steps twice")
    code, lines, error = csc(*words, *access)
    assert code == 0, error
    assert error.endswith("csc: the cluster tries steps twice")
    assert lines[1] == "models:/digits-b0c4-csc/1 knows 10 classes; task 4 brings bird, cat, dog, zebra"
    (run,) = server.runs.values()
    assert run["display_name"] == "digits-b0c4+4 · csc · train.epochs=2 · seed 7"
    parameters = run["runtime_config"]["parameters"]
    assert parameters["model"] == "models:/digits-b0c4-csc/1"
    assert (parameters["data"], parameters["test"]) == (data, "")
    assert json.loads(parameters["config"]) == {"method": "csc", "seed": 7, "train": {"epochs": 2}}
    code, _, error = csc(*words, *access, "--profile", "kubeflow")
    assert code == 2
    assert "images.cpu is an example" in error


def test_a_scenario_of_an_extended_model_is_not_run_as_such(csc, machine: None):
    code, _, error = csc("run", "digits-b0c4+4")
    assert code == 2
    assert error == "csc: scenario 'digits-b0c4+4' is that of an extended model; 'csc extend' makes one"
