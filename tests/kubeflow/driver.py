"""What the driver of Kubeflow Pipelines 2.17 makes of a compiled pipeline: which steps run, and what each is handed.

A model in Python, made from recordings of a real driver (`recorded/`) and, for what they do not show, from its source.
It walks the pipeline by its dependencies and makes the executor input of every step; `launch` runs the step. What this
project does not use (conditions, loops over artifacts, importers, a choice of outputs) it does not know.

An input artifact has a number for its name and no schema title: its type is empty if another task of the same
(sub-)pipeline made it, and missing if the sub-pipeline was given it.
"""

import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.kubeflow.pod_settings import task_config
from tests.kubeflow.references import Artifact, Scope, Task, Values
from tests.kubeflow.values import Refused, as_text, completed, invented, plain, stored

__all__ = ["LOGS", "Driver", "Output", "Step", "StepFailed", "plan", "read_package"]

ROOT = "minio://mlpipeline/v2/artifacts"
LOGS = "executor-logs"
STORE = {
    "accessKeyKey": "accesskey",
    "disableSSL": "true",
    "endpoint": "seaweedfs.kubeflow:9000",
    "fromEnv": "false",
    "maxRetries": "5",
    "region": "minio",
    "secretKeyKey": "secretkey",
    "secretName": "mlpipeline-minio-artifact",
}
SESSION = json.dumps({"Provider": "minio", "Params": STORE}, separators=(",", ":"))
_REFERENCE = re.compile(r"\{\{\$\.inputs\.parameters\['(.+?)'\]\}\}")

Output = Mapping[str, Any]  # what a step leaves: {"parameterValues": …, "artifacts": …}


class StepFailed(Exception):
    """A step that ran and failed."""


@dataclass(frozen=True)
class Step:
    """A container to run: `handed` is its executor input, `given` the artifacts in it."""

    path: str
    component: Mapping[str, Any]
    container: Mapping[str, Any]
    handed: Mapping[str, Any]
    given: Mapping[str, list[Artifact]]

    @property
    def name(self) -> str:
        """The component's function, which is the name of its folder."""
        words = self.container["args"]
        return str(words[words.index("--function_to_execute") + 1])

    @property
    def parameters(self) -> dict[str, Any]:
        """The values that the step is handed."""
        return dict(self.handed["inputs"].get("parameterValues", {}))


def read_package(path: Path) -> list[dict[str, Any]]:
    """Both documents of a compiled pipeline: the pipeline, and the settings of the platform if it has any."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))


def plan(documents: list[dict[str, Any]], fails: str = "", **arguments: Any) -> list[Step]:
    """The steps of a run in which each returns something of the right type, without running any.

    Args:
        documents: of the compiled pipeline.
        fails: component whose steps fail.
        arguments: of the run; the others that it needs are made up.
    """

    def launch(step: Step) -> Output:
        if step.name == fails:
            raise StepFailed("as it was told")
        specs = step.component.get("outputDefinitions", {}).get("parameters", {})
        return {"parameterValues": {name: invented(spec) for name, spec in specs.items()}}

    driver = Driver(documents, launch)
    needed = {name: spec for name, spec in driver.declared.items() if not spec.get("isOptional")}
    driver.run(**{name: invented(spec) for name, spec in needed.items()} | arguments)
    return driver.steps


class Driver:
    """One run of a compiled pipeline: `steps` are those that were launched, `failed` says why some failed, by path."""

    def __init__(self, documents: list[dict[str, Any]], launch: Callable[[Step], Output]) -> None:
        self.spec = documents[0]
        platform = documents[1]["platforms"]["kubernetes"] if len(documents) > 1 else {}
        self.settings = platform.get("deploymentSpec", {}).get("executors", {})
        self.launch = launch
        self.steps: list[Step] = []
        self.failed: dict[str, str] = {}
        self.pipeline, self.run_id = self.spec["pipelineInfo"]["name"], str(uuid.uuid4())
        self.job = f"{self.pipeline}-{self.run_id[:5]}"
        self._numbers = itertools.count(1)

    @property
    def declared(self) -> dict[str, Any]:
        """The arguments of a run, by name."""
        return dict(self.spec["root"].get("inputDefinitions", {}).get("parameters", {}))

    def run(self, **arguments: Any) -> Values:
        """Run the pipeline and return its outputs."""
        if unknown := arguments.keys() - self.declared.keys():
            raise Refused(f"arguments that the pipeline does not have: {', '.join(sorted(unknown))}")
        given = Values(completed(self.spec["root"], arguments, "the run"))
        return self._dag(self.spec["root"]["dag"], given, "")[0]

    def _dag(self, dag: Mapping[str, Any], given: Values, path: str) -> tuple[Values, str]:
        """Run the tasks of a (sub-)pipeline; return its outputs and how it ended."""
        names = {"{{$.pipeline_job_name}}": self.pipeline, "{{$.pipeline_job_resource_name}}": self.job}
        scope = Scope({**names, "{{$.pipeline_job_uuid}}": self.run_id}, given)
        for name in _ordered(dag["tasks"]):
            spec = dag["tasks"][name]
            component = self.spec["components"][spec["componentRef"]["name"]]
            if _runs(spec, scope.states):
                task = Task(name, f"{path}/{name}".lstrip("/"), spec, component)
                scope.done[name], scope.states[name] = self._task(task, scope)
            else:
                scope.states[name] = "CANCELED"
        if set(scope.states.values()) != {"COMPLETE"}:
            return Values(), "FAILED"
        return scope.outputs(dag.get("outputs", {})), "COMPLETE"

    def _task(self, task: Task, scope: Scope) -> tuple[Values, str]:
        if "artifactIterator" in task.spec or "condition" in task.spec.get("triggerPolicy", {}):
            raise NotImplementedError(f"{task.path}: a loop over artifacts, or a condition")
        inputs = scope.inputs(task)
        if "dag" not in task.component:
            return self._step(task, inputs, scope)
        if "parameterIterator" in task.spec:
            return self._loop(task, inputs)
        parameters = completed(task.component, inputs.parameters, task.path)
        return self._dag(task.component["dag"], Values(parameters, inputs.artifacts), task.path)

    def _loop(self, task: Task, inputs: Values) -> tuple[Values, str]:
        """Run a sub-pipeline for each item; its outputs are lists in the order of the items."""
        iterator = task.spec["parameterIterator"]
        source = iterator["items"].get("inputParameter", "")
        items = inputs.parameters.pop(source) if source else iterator["items"]["raw"]
        turns = []
        for index, item in enumerate(json.loads(items) if isinstance(items, str) else items):
            given = {**inputs.parameters, iterator["itemInput"]: item}
            inside = Values(completed(task.component, given, task.path, without=source), inputs.artifacts)
            turns.append(self._dag(task.component["dag"], inside, f"{task.path}[{index}]"))
        if any(state != "COMPLETE" for _, state in turns):
            return Values(), "FAILED"
        collected = Values()
        for outputs, _ in turns:
            for name, value in outputs.parameters.items():
                collected.parameters.setdefault(name, []).append(value)
            for name, artifacts in outputs.artifacts.items():
                collected.artifacts.setdefault(name, []).extend(artifacts)
        return collected, "COMPLETE"

    def _step(self, task: Task, inputs: Values, scope: Scope) -> tuple[Values, str]:
        """Hand a container its input, run it, and keep its outputs."""
        label = task.component["executorLabel"]
        container = self.spec["deploymentSpec"]["executors"][label]["container"]
        parameters = completed(task.component, inputs.parameters, task.path)
        for name, spec in task.component.get("inputDefinitions", {}).get("parameters", {}).items():
            if spec["parameterType"] == "TASK_CONFIG":
                parameters[name] = task_config(task.component, container, self.settings.get(label, {}), parameters)
        artifacts = {
            name: {"artifacts": [_handed(one, source) for one in scope.artifacts(task, source)]}
            for name, source in task.inputs("artifacts").items()
        }
        given = {key: value for key, value in (("artifacts", artifacts), ("parameterValues", parameters)) if value}
        folder = f"{ROOT}/{self.pipeline}/{self.run_id}/{task.name}/{uuid.uuid4()}"
        handed = _filled_in(plain({"inputs": given, "outputs": _provisioned(task.component, folder)}))
        step = Step(task.path, task.component, container, handed, inputs.artifacts)
        self.steps.append(step)
        try:
            return self._published(step, self.launch(step)), "COMPLETE"
        except StepFailed as error:
            self.failed[task.path] = str(error)
            return Values(), "FAILED"

    def _published(self, step: Step, output: Output) -> Values:
        """What the metadata store keeps of a step's outputs."""
        values = Values(plain(output.get("parameterValues", {})))
        for name, listed in step.handed["outputs"]["artifacts"].items():
            (wanted,) = listed["artifacts"]
            (left,) = output.get("artifacts", {}).get(name, {}).get("artifacts") or [{}]
            logged = left.get("metadata", {}).items()
            metadata = {
                "display_name": name,
                "store_session_info": SESSION,
                **{key: stored(value, f"{step.path}: {name}.{key}") for key, value in logged},
            }
            number, uri = next(self._numbers), left.get("uri") or wanted["uri"]
            values.artifacts[name] = [Artifact(number, uri, metadata, wanted["type"]["schemaTitle"], step.path)]
        return values


def _handed(artifact: Artifact, source: Mapping[str, Any]) -> dict[str, Any]:
    """An artifact as a step is handed it."""
    kind = {"type": {"instanceSchema": ""}} if "taskOutputArtifact" in source else {}
    return {"name": str(artifact.number), **kind, "uri": artifact.uri, "metadata": dict(artifact.metadata)}


def _provisioned(component: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Where a step is to leave its outputs; the launcher writes its lines to `executor-logs`."""
    defined = component.get("outputDefinitions", {})
    artifacts = {
        name: {"name": name, "type": spec["artifactType"], "uri": f"{folder}/{name}"}
        for name, spec in defined.get("artifacts", {}).items()
    }
    logs = {"name": LOGS, "type": {"schemaTitle": "system.Artifact"}, "uri": f"{folder}/{LOGS}-0"}
    parameters = {name: {"outputFile": f"/tmp/kfp/outputs/{name}"} for name in defined.get("parameters", {})}
    return {
        **({"parameters": parameters} if parameters else {}),
        "artifacts": {name: {"artifacts": [one]} for name, one in {**artifacts, LOGS: logs}.items()},
        "outputFile": f"{folder.replace('minio://', '/minio/')}/output_metadata.json",
    }


def _filled_in(handed: dict[str, Any]) -> dict[str, Any]:
    """Replace references to parameters inside of others, as the launcher does: in the JSON text, without quoting."""
    text, values = json.dumps(handed), handed["inputs"].get("parameterValues", {})
    filled: dict[str, Any] = json.loads(_REFERENCE.sub(lambda found: as_text(values[found[1]]), text))
    return filled


def _runs(spec: Mapping[str, Any], states: Mapping[str, str]) -> bool:
    """Whether a task runs, after those that it depends on have ended."""
    always = spec.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
    return always or all(states[name] == "COMPLETE" for name in spec.get("dependentTasks", ()))


def _ordered(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Names of tasks, each after those that it depends on."""
    seen: set[str] = set()

    def visit(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if name not in seen:
                seen.add(name)
                yield from visit(tasks[name].get("dependentTasks", ()))
                yield name

    yield from visit(tasks)
