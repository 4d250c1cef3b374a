"""What a cluster's driver makes of each shipped pipeline: every step is handed all that it needs, of the right kind."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from csc.pipelines.package import write_package
from csc.pipelines.profile import read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.study import build_study
from csc.pipelines.window import Window
from csc.scenario import CLASS_COUNTS, PAPER_SCENARIOS, Scenario
from csc.study.cells import DataSource, cells
from csc.study.reading import read_study
from tests.kubeflow.driver import Driver, Step, plan, read_package
from tests.kubeflow.pod_settings import resources
from tests.kubeflow.values import is_of_type

pytestmark = pytest.mark.slow  # compiling takes a second or more each time

MAPS = {"backbone": {"frozen": True}, "features": {"views": 1}}
NODES = {"train": {"nodes": 2}}
SOURCES = {name: DataSource(f"s3://bucket/{name}", classes) for name, classes in CLASS_COUNTS.items()}
SCENARIOS: dict[str, tuple[str, dict[str, Any], str | None]] = {  # scenario, settings, tasks
    **{name: (name, {}, None) for name in ("digits-b0c2", *PAPER_SCENARIOS)},
    "maps": ("voc-b10c2", MAPS, None),
    "nodes": ("coco-b0c10", NODES, None),
    "maps on nodes": ("digits-b0c2", {**MAPS, **NODES}, None),
    "window": ("voc-b4c2", {}, "3-5"),
    "window on maps": ("digits-b0c2", MAPS, "2-"),
    "first task": ("digits-b0c2", {}, "1"),
}
STUDIES: dict[str, tuple[Any, ...]] = {  # scenarios, rows and seeds of a shipped study
    "study digits": (None, None, [0, 1]),
    "study voc-maps": (["voc-b0c4"], ["csc", "er"], [0, 1]),
}
ALL = (*SCENARIOS, *STUDIES)
Documents = list[dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compile a pipeline for a cluster, once; return its documents."""
    folder, known = tmp_path_factory.mktemp("compiled"), {}

    def compile_once(name: str) -> Documents:
        if name not in known:
            _compile(name, folder / "pipeline.yaml")
            known[name] = read_package(folder / "pipeline.yaml")
        found: Documents = known[name]
        return found

    return compile_once


def _compile(name: str, path: Path) -> None:
    profile = read_profile("kubeflow")
    if name in STUDIES:
        study = read_study(name.removeprefix("study ")).subset(*STUDIES[name])
        write_package(build_study(study, cells(study, SOURCES), SOURCES, profile), path)
        return
    title, settings, tasks = SCENARIOS[name]
    scenario = Scenario.parse(title)
    classes = CLASS_COUNTS[scenario.dataset]
    window = Window.parse(tasks, scenario, classes)
    compile_pipeline(scenario, classes, path, settings, profile, window, on_cluster=True)


@pytest.fixture
def documents(compiled: Any, request: pytest.FixtureRequest) -> Documents:
    found: Documents = compiled(request.param)
    return found


@pytest.fixture
def steps(documents: Documents) -> list[Step]:
    return plan(documents)


everywhere = pytest.mark.parametrize("documents", ALL, indirect=True)


def declared(step: Step, kind: str) -> dict[str, Any]:
    return dict(step.component.get("inputDefinitions", {}).get(kind, {}))


@everywhere
def test_every_step_is_handed_what_it_needs_in_the_type_it_declares(steps: list[Step]):
    assert len(steps) >= 8
    for step in steps:
        json_format.ParseDict(step.handed, pipeline_spec_pb2.ExecutorInput())
        for name, spec in declared(step, "parameters").items():
            if name in step.parameters or not spec.get("isOptional"):
                assert is_of_type(step.parameters[name], spec["parameterType"]), (step.path, name)
        for name, spec in declared(step, "artifacts").items():
            assert name in step.given or spec.get("isOptional"), (step.path, name)


@everywhere
def test_every_artifact_comes_from_a_step_before_and_is_of_a_kind_that_the_step_takes(steps: list[Step]):
    paths = [step.path for step in steps]
    for number, step in enumerate(steps):
        for name, artifacts in step.given.items():
            wanted = declared(step, "artifacts")[name]["artifactType"]["schemaTitle"]
            for artifact in artifacts:
                assert artifact.producer in paths[:number]
                assert wanted in ("system.Artifact", artifact.title), (step.path, name)


def tasks_of(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every task of a pipeline and its sub-pipelines, with its component."""
    for part in (spec["root"], *spec["components"].values()):
        for task in part.get("dag", {}).get("tasks", {}).values():
            yield task, spec["components"][task["componentRef"]["name"]]


@everywhere
def test_no_parameter_of_a_step_is_a_text_with_another_in_it(documents: Documents):
    """The launcher puts values into such texts without quoting them, which breaks on settings: they are JSON."""
    for task, component in tasks_of(documents[0]):
        sources = task.get("inputs", {}).get("parameters", {})
        for name in component.get("inputDefinitions", {}).get("parameters", {}):
            assert "{{$.inputs" not in str(sources.get(name)), (task["taskInfo"]["name"], name)


def chains(steps: list[Step]) -> list[list[list[Step]]]:
    """The steps of each task, for each run of a scenario: a study has several."""
    found: dict[str, dict[str, list[Step]]] = {}
    for step in steps:
        task = step.path.rpartition("/")[0]
        if re.search(r"(base|incremental)-task(-\d+)?$", task):
            found.setdefault(task.rpartition("/")[0], {}).setdefault(task, []).append(step)
    return [list(tasks.values()) for tasks in found.values()]


def optional_artifacts(step: Step) -> set[str]:
    return {name for name, spec in declared(step, "artifacts").items() if spec.get("isOptional")}


@everywhere
def test_the_first_task_has_no_prior_and_each_later_one_that_of_the_task_before(steps: list[Step]):
    found = chains(steps)
    assert found
    for chain in found:
        above = chain[0][0].path.rpartition("/")[0].rpartition("/")[0]
        before = [step.path for step in steps if step.path == f"{above}/prior"]  # the model that a window continues
        for task in chain:
            for step in task:
                assert optional_artifacts(step) <= {"prior"}
                if "prior" in optional_artifacts(step):
                    assert [artifact.producer for artifact in step.given.get("prior", [])] == before
            before = [step.path for step in task if step.name == "register"]
            assert len(before) == 1


@pytest.mark.parametrize(
    ("documents", "length"),
    [("digits-b0c2", 5), ("voc-b4c2", 9), ("window", 3), ("study digits", 5)],
    indirect=["documents"],
)
def test_the_chains_are_as_long_as_the_scenario_has_tasks(steps: list[Step], length: int):
    found = chains(steps)
    assert {len(chain) for chain in found} == {length}
    assert all(sum(bool(optional_artifacts(step)) for step in task) == 3 for chain in found for task in chain)


@pytest.mark.parametrize("documents", ["digits-b0c2", "maps", "nodes", "window", "study voc-maps"], indirect=True)
def test_a_step_gets_as_many_gpus_as_the_run_asks_for(documents: Documents):
    """An amount that is an argument of the run is read as text: a number would be dropped without a word."""
    kind = Driver(documents, lambda step: {}).declared["gpus"]["parameterType"]
    steps = plan(documents, gpus="3" if kind == "STRING" else 3)
    asked = [step for step in steps if "accelerator" in step.container.get("resources", {})]
    assert {step.name for step in asked} >= {"evaluate"}
    for step in asked:
        count = resources(step.container, step.parameters)["limits"].get("nvidia.com/gpu", "none")
        assert count == ("1" if step.name == "embed" else "3"), step.path


@pytest.mark.parametrize("documents", ["digits-b0c2", "maps", "window", "study digits"], indirect=True)
def test_a_run_that_fails_runs_its_last_step_which_is_told(documents: Documents):
    steps = plan(documents, fails="evaluate")
    last = steps[-1]
    assert last.name in ("finish", "collect")
    assert last.parameters["status"]["state"] == "FAILED"
    assert "register" not in {step.name for step in steps}
    assert plan(documents)[-1].parameters["status"]["state"] == "COMPLETE"
