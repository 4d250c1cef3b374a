"""What is compiled for a cluster is small, and runs the same steps with the same inputs as what kfp writes."""

import ast
import json
import re

import pytest

from csc.components.__main__ import source_of
from csc.pipelines.package import compact, write_package
from csc.pipelines.profile import read_profile, run_defaults
from csc.pipelines.scenario import build_pipeline
from csc.pipelines.study import build_study
from csc.scenario import Scenario
from csc.study.cells import DataSource, cells
from csc.study.reading import read_study
from tests.kfp_server import parse_strictly
from tests.kubeflow.driver import plan, read_package

pytestmark = pytest.mark.slow  # compiling takes a second or more each time

PROFILE = read_profile("kubeflow")
MAPS = {"backbone": {"frozen": True}, "features": {"views": 1}}
SOURCES = {"voc": DataSource("/data/voc", 20)}


def scenario(settings):
    return build_pipeline(Scenario.parse("digits-b0c2"), 10, settings, PROFILE, on_cluster=True)


def study():
    asked = read_study("table2").subset(["voc-b0c4", "voc-b10c2"], ["csc", "lwf"], seeds=[0, 1])
    return build_study(asked, cells(asked, SOURCES), SOURCES, PROFILE)


PIPELINES = {
    "scenario": lambda: scenario({}),
    "maps": lambda: scenario(MAPS),
    "study": study,
}


@pytest.fixture(scope="module", params=PIPELINES)
def both(request, tmp_path_factory):
    """The files of a pipeline as kfp writes it, and for a cluster."""
    folder = tmp_path_factory.mktemp(request.param)
    pipeline = PIPELINES[request.param]()
    for name, on_cluster in (("plain", False), ("small", True)):
        write_package(pipeline, folder / f"{name}.yaml", on_cluster=on_cluster)
    return folder / "plain.yaml", folder / "small.yaml"


def steps_of(documents):
    """What runs, in which order, and what it is handed, without the ids that are new in each run."""
    ids = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|-[0-9a-f]{5}(?=\")")
    pods = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return [
        (
            step.path,
            {**step.container, "command": None},
            pods[step.component["executorLabel"]],
            json.loads(ids.sub("", json.dumps(step.handed))),
        )
        for step in plan(documents)
    ]


def source(text):
    """A component's function without its docstring, and whatever is imported before it."""
    function = ast.parse(text).body[-1]
    if ast.get_docstring(function):
        del function.body[0]
    return ast.dump(function)


def test_the_same_steps_run_with_the_same_inputs_and_settings(both):
    plain, small = map(read_package, both)
    assert steps_of(small) == steps_of(plain)
    for step, as_kfp_writes_it in zip(plan(small), plan(plain), strict=True):
        assert step.container["command"] == ["python3", "-m", "csc.components", step.name]
        assert source(source_of(step.name)) == source(as_kfp_writes_it.container["command"][-1])


def test_no_component_comes_twice_and_none_is_lost(both):
    small = read_package(both[1])
    parse_strictly(small)
    components, executors = small[0]["components"], small[0]["deploymentSpec"]["executors"]
    settings = small[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    labels = [component["executorLabel"] for component in components.values() if "executorLabel" in component]
    assert sorted(labels) == sorted(executors) == sorted(settings)
    functions = [executor["container"]["args"][-1] for executor in executors.values()]
    assert sorted(functions) == sorted({step.name for step in plan(small)})


def test_descriptions_of_steps_are_left_out_and_the_arguments_keep_theirs_and_their_defaults(tmp_path):
    known = run_defaults(PROFILE, Scenario.parse("digits-b0c2"))
    write_package(scenario({}), tmp_path / "small.yaml", known | {"gpus": "2"}, on_cluster=True)
    text = (tmp_path / "small.yaml").read_text()
    (small, _) = read_package(tmp_path / "small.yaml")
    assert text.startswith("# PIPELINE DEFINITION\n# Name: csc-digits-b0c2\n")
    assert "def " not in json.dumps(small["deploymentSpec"])
    assert "description" not in json.dumps(small["components"])
    arguments = small["root"]["inputDefinitions"]["parameters"]
    assert all(argument["description"] for argument in arguments.values())
    assert arguments["gpus"]["defaultValue"] == "2"
    assert arguments["checkpoints"]["defaultValue"] == PROFILE.storage.checkpoints


def test_components_that_differ_only_in_what_the_platform_sets_stay_apart():
    container = {"container": {"command": ["run"], "image": "image"}}
    spec = {
        "components": {"comp-a": {"executorLabel": "exec-a"}, "comp-a-2": {"executorLabel": "exec-a-2"}},
        "deploymentSpec": {"executors": {"exec-a": container, "exec-a-2": container}},
        "root": {"dag": {"tasks": {name: {"componentRef": {"name": f"comp-{name}"}} for name in ("a", "a-2")}}},
    }
    pods = {"exec-a": {"activeDeadlineSeconds": "1"}, "exec-a-2": {"activeDeadlineSeconds": "2"}}
    platform = {"platforms": {"kubernetes": {"deploymentSpec": {"executors": pods}}}}
    documents = json.loads(json.dumps([spec, platform]))
    compact(documents)
    assert documents == [spec, platform]
    pods["exec-a-2"] = pods["exec-a"]
    documents = json.loads(json.dumps([spec, platform]))
    compact(documents)
    assert list(documents[0]["components"]) == ["comp-a"]
    assert {task["componentRef"]["name"] for task in documents[0]["root"]["dag"]["tasks"].values()} == {"comp-a"}
    assert list(documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]) == ["exec-a"]


def test_an_executor_that_equal_components_share_stays():
    """As kfp sometimes makes them when it merges sub-pipelines."""
    task = {"a": {"componentRef": {"name": "comp-a"}}, "b": {"componentRef": {"name": "comp-b"}}}
    spec = {
        "components": {name: {"executorLabel": "exec-a"} for name in ("comp-a", "comp-b")},
        "deploymentSpec": {"executors": {name: {"container": {"command": [name]}} for name in ("exec-a", "exec-b")}},
        "root": {"dag": {"tasks": task}},
    }
    compact([spec])
    assert list(spec["components"]) == ["comp-a"]
    assert list(spec["deploymentSpec"]["executors"]) == ["exec-a"]
