"""The steps of a run, from what a real Kubeflow server said of it and from what it would say of others."""

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from csc.cli import main
from csc.pipelines.cluster.steps import RunStatus, run_status
from csc.pipelines.scenario import compile_pipeline
from csc.scenario import Scenario
from tests.kfp_nodes import Scene, Workflow, pipeline_tree
from tests.kfp_recorded import as_run, as_spec, recorded

WORKFLOW = "csc-digits-b0c2-mlsl7"
REUSED_TASK = ["split-labels", "build-dataset", "train", "evaluate", "register"]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The pipeline that was recorded, which had no exit handler."""
    return compiled(tmp_path_factory.mktemp("compiled") / "pipeline.yaml", on_cluster=False)


@pytest.fixture(scope="module")
def spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return documents[0]


def compiled(file: Path, on_cluster: bool) -> list[dict[str, Any]]:
    compile_pipeline(Scenario.parse("digits-b0c2"), 10, file, on_cluster=on_cluster)
    return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))


def shown(found: RunStatus) -> list[str]:
    return [re.sub(" +", " ", str(step)) for step in found.steps]


def moment(spec: dict[str, Any], scene: Scene, state: str = "RUNNING") -> RunStatus:
    """The steps of a moment that no recording has."""
    details = Workflow(pipeline_tree(spec), WORKFLOW, scene).details()
    return run_status(as_run({"run_id": "r", "state": state, "run_details": {"task_details": details}}), as_spec(spec))


def test_a_recorded_run_on_its_way(spec: dict[str, Any]):
    found = run_status(as_run(recorded("running")), as_spec(spec))
    assert shown(found) == [
        "ingest succeeded after 21 s",
        "task 1 · split-labels succeeded after 10 s",
        "task 1 · build-dataset succeeded after 20 s",
        "task 1 · train succeeded after 1 min 55 s",
        "task 1 · evaluate succeeded after 37 s",
        "task 1 · register starting",
    ]
    assert found.named


def test_a_recorded_run_that_failed(spec: dict[str, Any]):
    found = run_status(as_run(recorded("failed")), as_spec(spec))
    assert shown(found) == [
        "ingest succeeded after 21 s",
        "task 1 · split-labels succeeded after 10 s",
        "task 1 · build-dataset succeeded after 20 s",
        "task 1 · train succeeded after 1 min 55 s",
        "task 1 · evaluate succeeded after 37 s",
        "task 1 · register succeeded after 1 min 17 s",
        "task 2 · split-labels succeeded after 10 s",
        "task 2 · build-dataset succeeded after 10 s",
        "task 2 · train failed after 1 min 21 s",
    ]
    assert found.named
    assert found.failed is found.steps[-1]
    assert found.failed.pod == "csc-digits-b0c2-mlsl7-system-container-impl-666018923"


def test_a_recorded_run_from_the_cache(spec: dict[str, Any]):
    found = run_status(as_run(recorded("cached")), as_spec(spec))
    reused = [f"task {task} · {step} reused" for task in range(1, 6) for step in REUSED_TASK]
    assert shown(found) == ["ingest succeeded after 7 s", *reused, "report reused"]
    assert found.named
    assert {step.pod for step in found.steps[1:]} == {""}


NAMED = [
    "ingest succeeded after 10 s",
    "task 1 · split-labels reused",
    "task 1 · build-dataset reused",
    "task 1 · train succeeded after 32 s",
    "task 1 · evaluate succeeded after 21 s",
    "task 1 · register succeeded after 20 s",
    "task 2 · split-labels reused",
    "task 2 · build-dataset reused",
    "task 2 · train succeeded after 1 min 14 s",
    "task 2 · evaluate succeeded after 31 s",
    "task 2 · register succeeded after 39 s",
    "task 3 · split-labels succeeded after 11 s",
    "task 3 · build-dataset succeeded after 10 s",
    "task 3 · train succeeded after 2 min 43 s",
    "task 3 · evaluate succeeded after 33 s",
]


@pytest.mark.parametrize(("name", "since"), [("over-1MiB", 3), ("succeeded", 12)])
def test_a_recorded_run_over_1_mib_shows_what_is_known_and_how_many_more_there_are(
    spec: dict[str, Any], name: str, since: int
):
    found = run_status(as_run(recorded(name)), as_spec(spec))
    assert shown(found) == NAMED
    assert (found.named, found.unnamed) == (False, since)
    if name == "succeeded":
        assert len(found.steps) + found.unnamed == 27  # all steps of five tasks, ingest and report


def test_a_run_that_ended_while_its_steps_still_run_is_over_1_mib_too(spec: dict[str, Any]):
    answer = recorded("over-1MiB") | {"state": "FAILED"}
    answer["run_details"]["task_details"] = [
        detail for detail in answer["run_details"]["task_details"] if "execution_id" not in detail
    ]
    found = run_status(as_run(answer), as_spec(spec))
    assert (shown(found), found.named, found.unnamed, found.failed) == (NAMED, False, 0, None)


@pytest.mark.parametrize(
    ("name", "scene"),
    [
        ("running", Scene(6, driving=True)),
        ("failed", Scene(10, failing=8)),
        ("cached", Scene(28, reused=frozenset(range(1, 27)))),
    ],
)
def test_the_server_of_the_tests_lists_the_nodes_that_the_real_one_did(spec: dict[str, Any], name: str, scene: Scene):
    real = recorded(name)["run_details"]["task_details"]
    workflow = next(
        detail["display_name"] for detail in real if re.fullmatch(r"csc-.*-\w{5}", detail.get("display_name", ""))
    )
    ours = Workflow(pipeline_tree(spec), workflow, scene).details()

    def shape(details: list[dict[str, Any]]) -> Counter[Any]:
        keys = ("display_name", "state", "execution_id")
        return Counter(
            (
                *(detail.get(key) if key != "execution_id" else key in detail for key in keys),
                tuple(sorted(child["pod_name"] for child in detail.get("child_tasks", ()))),
                "child_tasks" in detail,
                detail["end_time"].startswith("0001"),
            )
            for detail in details
        )

    assert shape(ours) == shape(real)


def test_a_step_that_was_tried_again_keeps_its_title_and_the_next_ones_theirs(spec: dict[str, Any]):
    found = moment(spec, Scene(10, tries={3: 3}))
    assert shown(found)[3:6] == [
        "task 1 · train succeeded after 48 s, try 3",
        "task 1 · evaluate succeeded after 48 s",
        "task 1 · register succeeded after 48 s",
    ]
    assert shown(found)[8:] == ["task 2 · train succeeded after 48 s", "task 2 · evaluate running"]
    first, third = moment(spec, Scene(10)).steps[3].pod, found.steps[3].pod
    assert first != third  # that of the last try
    assert third == Workflow(pipeline_tree(spec), WORKFLOW, Scene(10, tries={3: 3})).pod(found.steps[3].key)


def test_a_step_whose_pod_waits_for_a_node_is_pending(spec: dict[str, Any]):
    assert shown(moment(spec, Scene(4, pending=True)))[-1] == "task 1 · train pending"
    assert shown(moment(spec, Scene(4, pending=True, tries={3: 2})))[-1] == "task 1 · train pending, try 2"


def test_of_a_node_that_is_listed_twice_the_newer_one_counts(spec: dict[str, Any]):
    """As after a retry of the whole run, if the server keeps what it knew of the first time."""
    answer = recorded("failed")
    details = answer["run_details"]["task_details"]
    (failed,) = [one for one in details if (one.get("display_name"), one.get("state")) == ("train", "FAILED")]
    again = failed | {"state": "RUNNING", "start_time": "2026-11-17T07:10:00Z", "end_time": "0001-01-01T00:00:00Z"}
    for index in (0, len(details)):
        answer["run_details"]["task_details"] = [*details[:index], again, *details[index:]]
        assert shown(run_status(as_run(answer | {"state": "RUNNING"}), as_spec(spec)))[-1] == "task 2 · train running"


def test_a_step_whose_driver_failed_has_failed(spec: dict[str, Any]):
    answer = recorded("running") | {"state": "FAILED"}
    for detail in answer["run_details"]["task_details"]:
        if "register-driver" in detail.get("display_name", ""):
            detail |= {"state": "FAILED", "end_time": "2026-11-17T06:58:53Z"}
    found = run_status(as_run(answer), as_spec(spec))
    assert shown(found)[-1] == "task 1 · register failed after 30 s"
    assert found.failed is not None
    assert found.failed.pod.startswith("csc-digits-b0c2-mlsl7-system-container-driver-")


@pytest.mark.parametrize(
    "scene",
    [Scene(6), Scene(10, failing=8), Scene(28, reused=frozenset(range(1, 27))), Scene(4, pending=True)],
    ids=["running", "failed", "cached", "pending"],
)
def test_a_cluster_without_tries_in_its_nodes_is_read_as_well(spec: dict[str, Any], scene: Scene):
    """Older installations have no retry strategy for all templates."""
    details = Workflow(pipeline_tree(spec), WORKFLOW, scene, tries=False).details()
    assert not any("(0)" in detail.get("display_name", "") for detail in details)
    found = run_status(
        as_run({"run_id": "r", "state": "RUNNING", "run_details": {"task_details": details}}), as_spec(spec)
    )
    with_tries = moment(spec, scene)
    assert shown(found) == shown(with_tries)
    assert [bool(step.pod) for step in found.steps] == [bool(step.pod) for step in with_tries.steps]


def test_the_exit_handler_of_a_run_is_a_step_of_its_own(tmp_path: Path):
    spec = compiled(tmp_path / "pipeline.yaml", on_cluster=True)[0]
    found = moment(spec, Scene(10, failing=8), "FAILED")
    assert shown(found)[-2:] == ["task 2 · train failed after 48 s", "finish succeeded after 48 s"]
    assert shown(found)[0] == "ingest succeeded after 48 s"
    assert found.named
    assert shown(moment(spec, Scene(29), "SUCCEEDED"))[-2:] == [
        "report succeeded after 48 s",
        "finish succeeded after 48 s",
    ]


def test_the_steps_of_a_study_tell_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("storage: {data: 's3://bucket/{dataset}'}")
    words = ["--methods", "csc,lwf", "--seeds", "1", "--profile", "there.yaml", "--compile", "study.yaml"]
    assert main(["study", "digits", *words]) == 0
    spec = next(yaml.load_all((tmp_path / "study.yaml").read_text(), yaml.CSafeLoader))
    steps = pipeline_tree(spec).steps()
    found = moment(spec, Scene(len(steps) + 1), "SUCCEEDED")
    assert (len(found.steps), found.named) == (len(steps), True)
    titles = [step.title for step in found.steps]
    assert len(set(titles)) == len(titles)
    assert {
        "digits-b0c2 · lwf seed 1 · ingest",
        "digits-b0c2 · lwf seed 1 · task 1 · train",
        "digits-b0c2 · csc seed 1 · task 5 · register",
        "digits-b0c2 · csc seed 1 · report",
        "collect",
    } <= set(titles)
    assert found.steps[0].title == "digits-b0c2 · lwf seed 1 · ingest"


def test_without_its_pipeline_steps_are_called_by_their_names_in_the_workflow():
    found = run_status(as_run(recorded("failed")), as_spec({"root": {}}))
    assert shown(found)[0] == "ingest succeeded after 21 s"
    assert shown(found)[-1] == "incremental-task · train failed after 1 min 21 s"


def test_pods_of_steps_with_retries_or_labels_have_other_names(documents: list[dict[str, Any]]):
    spec = copy.deepcopy(documents[0])
    train = spec["components"]["comp-incremental-task"]["dag"]["tasks"]["train"]
    run = as_run(recorded("failed"))
    train["retryPolicy"] = {"maxRetryCount": 3}
    assert "-mlsl7-retry-system-container-impl-666018923" in run_status(run, as_spec(spec)).steps[-1].pod
    label = spec["components"][train["componentRef"]["name"]]["executorLabel"]
    executors = {label: {"podMetadata": {"labels": {"a": "b", "c": "d"}}}}
    spec["platforms"] = {"kubernetes": {"deploymentSpec": {"executors": executors}}}
    assert "-metadata-0-2-retry-system-container-impl-666018923" in run_status(run, as_spec(spec)).steps[-1].pod


@pytest.mark.parametrize("details", [None, []])
def test_a_run_that_has_just_been_made_has_no_steps(spec: dict[str, Any], details: Any):
    for answer in ({"run_id": "r", "run_details": {"task_details": details}}, {"run_id": "r"}):
        found = run_status(as_run(answer), as_spec(spec))
        assert (found.steps, found.named, found.unnamed) == ([], True, 0)
