"""Every component does its work in the pod of a Kubeflow step: kfp's executor, handed what a real backend hands it.

The pipelines are compiled as for a cluster, with tiny data; `tests.kubeflow` plays the backend and the pods.
"""

import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from csc.components.__main__ import source_of
from csc.config import resolve
from csc.data.ingest.coco import ingest_coco
from csc.data.ingest.digits import ingest_digits
from csc.pipelines.extension import compile_extension
from csc.pipelines.local.runner import run_compiled
from csc.pipelines.package import write_package
from csc.pipelines.profile import read_profile
from csc.pipelines.scenario import compile_pipeline
from csc.pipelines.study import build_study
from csc.pipelines.window import Window
from csc.scenario import Scenario
from csc.study.cells import DataSource, cells
from csc.study.spec import Row, Study
from tests.builders import make_coco
from tests.golden.readme import NAMES
from tests.kubeflow.driver import Driver, Step, StepFailed, read_package
from tests.kubeflow.pod import SHELL, Pods, Start, forked, started
from tests.kubeflow.recorded import RECORDED
from tests.kubeflow.trainer import INSTALL, KEPT
from tests.kubeflow.values import is_of_type
from tests.tracked import fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kubeflow")]  # the pipelines run once, for all tests here

DIGITS, CLASSES = Scenario.parse("digits-b0c5"), 10
VOLUME = "/mnt/csc"  # where the profile mounts what all pods share
SETTINGS: dict[str, Any] = {
    "train": {"epochs": 1, "batch_size": 16},
    "backbone": {"name": "test_byobnet"},
    "cigcn": {"width": 8},
    "input": {"size": 32},
}
ON_MAPS = {**SETTINGS, "backbone": {"name": "test_byobnet", "frozen": True}, "features": {"views": 1}}
ON_NODES = {**SETTINGS, "train": {**SETTINGS["train"], "nodes": 2, "workers": 0}}
IMPORTS = "from typing import Optional\n"
BROKEN = {**SETTINGS, "init": "/no/such/weights.safetensors"}


@dataclass(frozen=True)
class Run:
    """A pipeline that was run, and the pods that did it."""

    driver: Driver
    pods: Pods

    @property
    def steps(self) -> list[Step]:
        return self.driver.steps

    def results(self) -> list[dict[str, Any]]:
        """The metrics of all tasks, from the record of the last one."""
        last = [step for step in self.steps if step.name == "register"][-1]
        (registered,) = last.handed["outputs"]["artifacts"]["registered"]["artifacts"]
        return _metrics(self.pods.path(registered["uri"]))


def _metrics(registered: Path) -> list[dict[str, Any]]:
    return [task["metrics"] for task in json.loads(registered.read_text())["run"]["tasks"]]


@dataclass(frozen=True)
class Kubeflow:
    """What pipelines run in: data, an object store, a tracking server, and a volume that all pods share."""

    folder: Path
    start: Start

    @property
    def data(self) -> str:
        return str(self.folder / "digits")

    @property
    def environment(self) -> dict[str, str]:
        tracking = f"sqlite:///{self.folder / 'mlflow.db'}"
        return {"MLFLOW_TRACKING_URI": tracking, "CSC_CACHE": str(self.folder / "cache")}

    def run(
        self, compile_to: Callable[[Path], None], preparation: str = "", fails: bool = False, **arguments: str
    ) -> Run:
        """Compile and run a pipeline."""
        package, shared = self.folder / "pipeline.yaml", self.folder / "shared"
        compile_to(package)
        package.write_text(package.read_text().replace(VOLUME, str(shared)))
        (shared / "checkpoints").mkdir(parents=True, exist_ok=True)
        pods = Pods(self.folder / "store", self.start, self.environment, preparation)
        driver = Driver(read_package(package), pods)
        driver.run(**arguments)
        assert bool(driver.failed) == fails, "\n\n".join(driver.failed.values())
        return Run(driver, pods)

    def scenario(self, settings: dict[str, Any], tasks: str | None = None, **how: Any) -> Run:
        """Run the scenario as it is submitted to a cluster."""
        profile, window = read_profile("kubeflow"), Window.parse(tasks, DIGITS, CLASSES)

        def compile_to(path: Path) -> None:
            compile_pipeline(DIGITS, CLASSES, path, settings, profile, window, on_cluster=True)

        return self.run(compile_to, data=self.data, **how)


@pytest.fixture(scope="module")
def kubeflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubeflow]:
    folder = tmp_path_factory.mktemp("kubeflow")
    fresh_database(folder)
    with forked() as start:
        environment = Kubeflow(folder, start)
        ingest_digits(Path(environment.data), train=60, test=30, size=32)
        yield environment


@pytest.fixture(scope="module")
def scenario(kubeflow: Kubeflow) -> Run:
    return kubeflow.scenario(SETTINGS)


@pytest.fixture(scope="module")
def window(kubeflow: Kubeflow, scenario: Run) -> Run:
    """The second task alone, which continues the registered model of the first."""
    return kubeflow.scenario(SETTINGS, tasks="2")


@pytest.fixture(scope="module")
def nodes(kubeflow: Kubeflow, scenario: Run) -> Run:
    """The second task, trained by the Kubeflow Trainer."""
    return kubeflow.scenario(ON_NODES, tasks="2", preparation=INSTALL)


@pytest.fixture(scope="module")
def study(kubeflow: Kubeflow) -> Run:
    """Two runs of a single task, on maps of a frozen backbone."""
    row = Row("Fine-Tuning", "finetune")
    small = {key: value for key, value in ON_MAPS.items() if key != "cigcn"}
    asked = Study("small", "Small", (row,), ("digits-b0c10",), seeds=(0, 1), settings=small)
    sources = {"digits": DataSource(kubeflow.data, CLASSES)}
    profile = read_profile("kubeflow")
    return kubeflow.run(
        lambda path: write_package(build_study(asked, cells(asked, sources), sources, profile), path, on_cluster=True)
    )


@pytest.fixture(scope="module")
def extension(kubeflow: Kubeflow, scenario: Run) -> Run:
    """One more task on the registered model, with four animals; the digits are judged as well."""
    animals = ingest_coco(make_coco(kubeflow.folder / "coco"), kubeflow.folder / "animals", "animals")
    later, config, profile = (
        DIGITS.extended(len(animals.classes)),
        resolve("digits", SETTINGS),
        read_profile("kubeflow"),
    )
    tasks = len(DIGITS.sizes(CLASSES))

    def compile_to(path: Path) -> None:
        compile_extension(later, tasks + 1, config, "f" * 64, path, True, profile, on_cluster=True)

    model = f"models:/{DIGITS.name}-{config.method}/{tasks}"
    return kubeflow.run(compile_to, data=animals.uri, test=kubeflow.data, model=model)


RUNS = ("scenario", "window", "nodes", "study", "extension")


@pytest.fixture(scope="module")
def steps(scenario: Run, window: Run, nodes: Run, study: Run, extension: Run) -> list[Step]:
    """Every step of every pipeline."""
    return [step for run in (scenario, window, nodes, study, extension) for step in run.steps]


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("component", NAMES)
def test_every_component_was_run(component: str, steps: list[Step]):
    assert component in {step.name for step in steps}, "run it in one of the pipelines here"


def check_left(step: Step, pods: Pods) -> None:
    """What a step has left is what it declares, in a form that the backend can keep and hand on unchanged."""
    output = pods.outputs[step.path]
    declared = step.component.get("outputDefinitions", {})
    values = output.get("parameterValues", {})
    assert values.keys() == declared.get("parameters", {}).keys()
    for name, spec in declared.get("parameters", {}).items():
        assert is_of_type(values[name], spec["parameterType"]), (step.path, name)
    for name, spec in declared.get("artifacts", {}).items():
        (artifact,) = output["artifacts"][name]["artifacts"]
        assert pods.path(artifact["uri"]).exists(), (step.path, name)
        if spec["artifactType"]["schemaTitle"] == "system.ClassificationMetrics":  # points of a curve
            (points,) = artifact["metadata"].values()
            assert all(math.isfinite(value) for point in points for value in point.values()), (step.path, name)
            continue
        for key, value in artifact["metadata"].items():
            assert type(value) is str or (type(value) in (int, float) and math.isfinite(value)), (step.path, name, key)


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_every_step_leaves_what_it_declares_and_what_the_backend_can_keep(run: Run):
    assert len(run.steps) == len(run.pods.outputs) >= 7
    for step in run.steps:
        check_left(step, run.pods)


def test_a_scenario_has_the_numbers_of_the_same_pipeline_on_this_machine(
    kubeflow: Kubeflow, scenario: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", fresh_database(tmp_path))
    compile_pipeline(DIGITS, CLASSES, tmp_path / "local.yaml", SETTINGS)
    run_compiled(tmp_path / "local.yaml", {"data": kubeflow.data}, tmp_path)
    records = sorted((tmp_path / "pipeline").rglob("registered"), key=lambda path: path.stat().st_mtime)
    assert len(records) == 2
    assert scenario.results() == _metrics(records[-1])


def test_a_window_has_the_numbers_of_the_whole_scenario(scenario: Run, window: Run):
    assert [step.name for step in window.steps].count("train") == 1
    assert window.results() == scenario.results()


def test_a_task_on_several_nodes_asks_for_what_the_pipeline_sets(kubeflow: Kubeflow, nodes: Run, scenario: Run):
    job = json.loads((kubeflow.folder / "shared" / "checkpoints" / KEPT).read_text())
    (handed,) = [step.parameters["task_config"] for step in nodes.steps if step.name == "train_on_nodes"]
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"] == handed["resources"]
    assert {item["name"] for item in handed["env"]} <= {item["name"] for item in trainer["env"]}
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert [volume for volume in pod["volumes"] if volume in handed["volumes"]] == handed["volumes"]
    assert (pod["nodeSelector"], pod["tolerations"]) == (handed["nodeSelector"], handed["tolerations"])
    assert nodes.results()[1]["mAP"] == pytest.approx(scenario.results()[1]["mAP"])


def test_a_run_that_fails_still_ends_in_its_last_step(kubeflow: Kubeflow):
    run = kubeflow.scenario(BROKEN, fails=True)
    (path,) = run.driver.failed
    last = run.steps[-1]
    assert path.endswith("base-task/train")
    assert f"init={BROKEN['init']}: no such file" in run.driver.failed[path]
    assert last.path in run.pods.outputs
    assert last.parameters["status"]["state"] == "FAILED"


# What a real backend handed to the components


def fitted(recorded: dict[str, Any], step: Step) -> dict[str, Any]:
    """A recorded input with the files and values of a step here; what the component has got since is the step's own."""
    inputs, outputs = step.handed["inputs"], step.handed["outputs"]
    then, left = recorded["inputs"], recorded["outputs"]
    artifacts = {}
    for name, listed in inputs.get("artifacts", {}).items():
        known = then.get("artifacts", {}).get(name, listed)["artifacts"]
        pairs = zip(known, listed["artifacts"], strict=True)
        artifacts[name] = {"artifacts": [{**old, "uri": new["uri"]} for old, new in pairs]}
    values = {
        name: then["parameterValues"][name] if isinstance(value, dict) else value
        for name, value in inputs.get("parameterValues", {}).items()
    }
    destinations = {
        kind: {name: left.get(kind, {}).get(name, new) for name, new in outputs[kind].items()}
        for kind in ("parameters", "artifacts")
        if kind in outputs
    }
    given = {key: value for key, value in (("artifacts", artifacts), ("parameterValues", values)) if value}
    return {"inputs": given, "outputs": {**destinations, "outputFile": left["outputFile"]}}


@pytest.mark.parametrize("name", RECORDED)
def test_a_component_takes_what_a_real_backend_handed_it(name: str, kubeflow: Kubeflow, steps: list[Step]):
    recorded = RECORDED[name]
    known = recorded["inputs"].get("artifacts", {}).keys()
    alike = [step for step in steps if step.name == name.removesuffix("-2")]
    step = min(alike, key=lambda step: len(known ^ step.given.keys()))
    step = dataclasses.replace(step, handed=fitted(recorded, step))
    pods = Pods(kubeflow.folder / "store", kubeflow.start, kubeflow.environment)
    pods(step)
    check_left(step, pods)


def test_an_optional_artifact_in_the_form_that_failed_on_a_real_cluster_fails_here(scenario: Run):
    """Without a schema title kfp makes the artifact from its annotation, and `Optional` of one cannot be made."""
    later = [step for step in scenario.steps if "prior" in step.given]
    assert {step.name for step in later} == {"train", "evaluate", "register"}
    for step in later:
        source = source_of(step.name)
        old = source.replace("prior: dsl.Input[dsl.Model]", "prior: Optional[dsl.Input[dsl.Model]]")
        assert old != source
        changed = dataclasses.replace(step, container={**step.container, "command": [*SHELL, f"{IMPORTS}{old}"]})
        with pytest.raises(StepFailed, match=r"Cannot instantiate typing\.Union"):
            scenario.pods(changed)


def test_a_fork_does_what_the_containers_own_command_does(kubeflow: Kubeflow, scenario: Run, tmp_path: Path):
    step = next(step for step in scenario.steps if step.name == "split_labels")
    (split,) = step.handed["outputs"]["artifacts"]["split"]["artifacts"]
    made = scenario.pods.path(split["uri"]).read_bytes()
    handed = json.dumps(step.handed).replace("minio://", f"{tmp_path}/").replace("/minio/", f"{tmp_path}/")
    command = [*step.container["command"], *(word.replace("{{$}}", handed) for word in step.container["args"])]
    assert command[:4] == ["python3", "-m", "csc.components", "split_labels"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    code, lines = started(command, {**kubeflow.environment, "PATH": path})
    assert code == 0, lines
    assert (tmp_path / split["uri"].removeprefix("minio://")).read_bytes() == made
