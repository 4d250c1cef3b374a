"""Every scenario compiles, to what the cluster's own schema accepts, within its size limits."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format

from csc.scenario import PAPER_SCENARIOS
from tests.golden.readme import NAMES, readmes
from tests.golden.write import GOLDEN, compile_to, golden_path, tasks_of
from tests.kfp_server import parse_strictly

STEPS_PER_TASK = 5
SIZE_BUDGET = 512 << 10  # bytes; the cluster's hard limits begin at three times this
TASK_BUDGET = 100  # container tasks


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile a scenario once; return the file and its YAML documents."""
    folder, known = tmp_path_factory.mktemp("compiled"), {}

    def compile_once(name):
        if name not in known:
            path = folder / f"{name}.yaml"
            compile_to(name, path)
            known[name] = path, list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
        return known[name]

    return compile_once


FEATURES, NODES = "voc-b10c2-features", "coco-b0c10-nodes"
EACH_FORM = ("digits-b0c2", "voc-b0c4", FEATURES, NODES)
LONGER = [name for name in (*PAPER_SCENARIOS, "voc-b0c20", "digits-b0c3") if name not in EACH_FORM]
ALL = (*EACH_FORM, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER))


@pytest.mark.parametrize("name", GOLDEN)
def test_compiled_form_is_the_reviewed_one(compiled, name):
    path, _ = compiled(name)
    assert path.read_text() == golden_path(name).read_text(), "compiled form changed: review it, then 'make golden'"


@pytest.mark.parametrize("name", ALL)
def test_both_documents_parse_strictly_against_the_clusters_schema(compiled, name):
    parse_strictly(compiled(name)[1])


def test_the_parse_against_the_clusters_schema_is_strict(compiled):
    _, documents = compiled("digits-b0c2")
    with pytest.raises(json_format.ParseError):
        parse_strictly([{**documents[0], "surprise": 1}, *documents[1:]])


@pytest.mark.parametrize("name", ALL)
def test_size_and_number_of_tasks_stay_within_budget(compiled, name):
    path, documents = compiled(name)
    window = tasks_of(name)
    tasks = window.last - window.first + 1
    executors = documents[0]["deploymentSpec"]["executors"]
    assert len(executors) == tasks * STEPS_PER_TASK + (3 if name == FEATURES else 2)
    assert len(executors) <= TASK_BUDGET
    assert path.stat().st_size <= SIZE_BUDGET


def test_train_and_evaluate_ask_for_gpus_and_shared_memory(compiled):
    _, (spec, platform) = compiled("voc-b0c4")
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, executor in spec["deploymentSpec"]["executors"].items():
        trains = name.startswith(("exec-train", "exec-evaluate"))
        assert ("accelerator" in executor["container"].get("resources", {})) == trains
        assert (name in settings) == trains
        if trains:
            assert settings[name]["emptyDirMounts"][0]["mountPath"] == "/dev/shm"


def test_the_embed_step_comes_once_and_its_maps_go_to_every_train_and_evaluate(compiled):
    _, (spec, _) = compiled(FEATURES)
    root = spec["root"]["dag"]["tasks"]
    assert not root["embed"]["cachingOptions"].get("enableCache")  # it looks at what is there itself
    for name, task in root.items():
        if name.startswith(("base-task", "incremental-task")):
            assert task["inputs"]["parameters"]["features"]["taskOutputParameter"]["producerTask"] == "embed"
    for component in ("comp-base-task", "comp-incremental-task"):
        tasks = spec["components"][component]["dag"]["tasks"]
        for step in ("train", "evaluate"):
            assert tasks[step]["inputs"]["parameters"]["features"] == {"componentInputParameter": "features"}
    assert '"views": 2' in spec["root"]["inputDefinitions"]["parameters"]["config"]["defaultValue"]


@pytest.mark.parametrize("name", ["voc-b0c4", "digits-b0c2"])
def test_without_the_setting_there_is_no_embed_step(compiled, name):
    _, (spec, _) = compiled(name)
    assert "embed" not in spec["root"]["dag"]["tasks"]


def test_on_several_nodes_the_launching_pod_has_no_gpus_and_passes_everything_on(compiled):
    _, (spec, _) = compiled(NODES)
    executors = spec["deploymentSpec"]["executors"]
    launchers = {name for name in executors if name.startswith("exec-train-on-nodes")}
    assert len(launchers) == 2
    component = next(value for name, value in spec["components"].items() if name.startswith("comp-train-on-nodes"))
    fields = {item["field"]: item.get("applyToTask", False) for item in component["taskConfigPassthroughs"]}
    assert fields.pop("RESOURCES") is False
    assert all(fields.values())
    assert {"ENV", "KUBERNETES_VOLUMES", "KUBERNETES_TOLERATIONS", "KUBERNETES_NODE_SELECTOR"} <= fields.keys()
    assert '"nodes": 2' in spec["root"]["inputDefinitions"]["parameters"]["config"]["defaultValue"]


@pytest.mark.parametrize("name", ["voc-b4c2"])
def test_each_task_starts_from_the_registered_model_of_the_one_before(compiled, name):
    _, documents = compiled(name)
    tasks = documents[0]["root"]["dag"]["tasks"]
    chain = [task for task in tasks if task.startswith("incremental-task")]
    assert len(chain) == 8
    order = ["base-task", "incremental-task", *(f"incremental-task-{number}" for number in range(2, 9))]
    for before, task in pairwise(order):
        source = tasks[task]["inputs"]["artifacts"]["prior"]["taskOutputArtifact"]
        assert source["producerTask"] == before


def test_on_a_cluster_an_exit_handler_that_is_never_reused_closes_the_tracked_runs(compiled):
    _, (spec, _) = compiled("voc-b0c4-kubeflow")
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {"exit-handler-1", "finish"}
    closing = tasks["finish"]
    assert closing["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert not closing["cachingOptions"].get("enableCache")
    assert closing["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": "exit-handler-1"}}
    assert {"ingest", "report"} <= set(spec["components"]["comp-exit-handler-1"]["dag"]["tasks"])


@pytest.mark.parametrize("name", ["voc-b0c4-kubeflow", "digits-b0c2"])
def test_every_argument_of_a_run_is_described(compiled, name):
    _, (spec, *_) = compiled(name)
    arguments = spec["root"]["inputDefinitions"]["parameters"]
    assert set(arguments) == {"data", "config", "checkpoints", "gpus"}
    assert all(argument["description"] for argument in arguments.values())


@pytest.mark.parametrize("name", ["voc-b0c4-kubeflow", FEATURES])
def test_every_output_is_named_after_what_it_is(compiled, name):
    _, (spec, *_) = compiled(name)
    slots = [component.get("outputDefinitions", {}) for component in spec["components"].values()]
    names = {name for slot in slots for kind in slot.values() for name in kind}
    assert {"origin", "registered", "text"} <= names
    assert "Output" not in names  # what kfp calls a result that has no name


def test_the_page_of_a_run_draws_what_evaluate_and_report_found(compiled):
    _, (spec, *_) = compiled("voc-b0c4-kubeflow")
    drawn = {
        name: slot["artifactType"]["schemaTitle"]
        for step in ("comp-evaluate", "comp-report")
        for name, slot in spec["components"][step]["outputDefinitions"]["artifacts"].items()
    }
    assert drawn.pop("scores") == "system.Dataset"
    assert drawn == {
        "metrics": "system.Metrics",
        "roc": "system.ClassificationMetrics",
        "page": "system.HTML",
        "table": "system.Markdown",
    }


@pytest.mark.parametrize("name", ALL)
def test_no_machine_path_and_no_package_install_is_in_the_pipeline(compiled, name):
    path, _ = compiled(name)
    text = path.read_text()
    assert "pip install" not in text
    assert str(Path.home()) not in text
    assert str(path.parent) not in text


def test_ingest_always_looks_at_the_data_and_everything_else_may_be_reused(compiled):
    _, documents = compiled("digits-b0c2")
    spec = documents[0]
    assert not spec["root"]["dag"]["tasks"]["ingest"]["cachingOptions"].get("enableCache")
    for component in spec["components"].values():
        for task in component.get("dag", {}).get("tasks", {}).values():
            assert task["cachingOptions"]["enableCache"]


@pytest.mark.parametrize(("path", "content"), list(readmes()), ids=NAMES)
def test_component_readme_says_what_the_component_is(path, content):
    assert path.read_text() == content, "component changed: 'make golden' writes its README"


@pytest.mark.parametrize("name", ["comp-base-task", "comp-incremental-task"])
def test_another_tracking_server_changes_the_cache_key_of_every_step(compiled, name):
    """Ingest, which always runs, writes the server's address into `origin`; KFP compares what a step is given."""
    _, (spec, _) = compiled("digits-b0c2")
    assert not spec["root"]["dag"]["tasks"]["ingest"].get("cachingOptions")
    steps = spec["components"][name]["dag"]["tasks"]

    def depends(step: str) -> bool:
        inputs = steps[step]["inputs"]
        makers = [
            found.get("taskOutputArtifact", {}).get("producerTask") for found in inputs.get("artifacts", {}).values()
        ]
        return "origin" in inputs.get("parameters", {}) or any(depends(maker) for maker in makers if maker)

    assert {step for step in steps if not depends(step)} == set()
