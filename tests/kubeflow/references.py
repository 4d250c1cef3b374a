"""What the tasks of a pipeline refer to, resolved as the driver of Kubeflow Pipelines 2.17 does it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kubeflow.values import Refused

__all__ = ["Artifact", "Scope", "Task", "Values"]


@dataclass(frozen=True)
class Artifact:
    """An output as the metadata store keeps it; `title` and `producer` are never handed on."""

    number: int
    uri: str
    metadata: Mapping[str, Any]
    title: str
    producer: str


@dataclass
class Values:
    """The inputs of a pipeline, or the outputs of a task."""

    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, list[Artifact]] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A task of a compiled pipeline; `path` tells it from those of the same name in other sub-pipelines."""

    name: str
    path: str
    spec: Mapping[str, Any]
    component: Mapping[str, Any]

    def inputs(self, kind: str) -> Mapping[str, Any]:
        """Where its parameters or artifacts come from."""
        sources: Mapping[str, Any] = self.spec.get("inputs", {}).get(kind, {})
        return sources


@dataclass
class Scope:
    """What the tasks of a (sub-)pipeline can refer to.

    Attributes:
        run: what the run itself is called, by placeholder.
        given: inputs of the (sub-)pipeline.
        done: outputs of the tasks that have ended.
        states: how they ended.
    """

    run: Mapping[str, str]
    given: Values
    done: dict[str, Values] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    def inputs(self, task: Task) -> Values:
        """The inputs of a task; a parameter that is null counts as left out."""
        found = {name: self._parameter(task, source) for name, source in task.inputs("parameters").items()}
        artifacts = {name: self.artifacts(task, source) for name, source in task.inputs("artifacts").items()}
        return Values({name: value for name, value in found.items() if value is not None}, artifacts)

    def _parameter(self, task: Task, source: Mapping[str, Any]) -> Any:
        ((kind, value),) = source.items()  # with an expression next to it, it would be a part of an item: not used here
        if kind == "componentInputParameter":
            return _found(self.given.parameters, value, f"{task.path}: parent DAG has no input parameter {value}")
        if kind == "taskOutputParameter":
            made = self._made(task, value["producerTask"]).parameters
            return _found(made, value["outputParameterKey"], f"{task.path}: {value} is no output")
        if kind == "taskFinalStatus":
            before = task.spec["dependentTasks"][0]
            job = self.run["{{$.pipeline_job_resource_name}}"]
            return {
                "state": self.states[before],
                "pipelineTaskName": before,
                "pipelineJobResourceName": job,
                "error": {},
            }
        constant = value["constant"]
        return self.run.get(constant, constant) if isinstance(constant, str) else constant

    def artifacts(self, task: Task, source: Mapping[str, Any]) -> list[Artifact]:
        """One artifact, or those that a loop has collected."""
        if name := source.get("componentInputArtifact"):
            return list(_found(self.given.artifacts, name, f"{task.path}: parent DAG has no input artifact {name}"))
        output = source["taskOutputArtifact"]
        made = self._made(task, output["producerTask"]).artifacts
        return list(_found(made, output["outputArtifactKey"], f"{task.path}: {output} is no output"))

    def _made(self, task: Task, producer: str) -> Values:
        made: Values = _found(self.done, producer, f"{task.path}: producer task {producer} has not run")
        return made

    def outputs(self, spec: Mapping[str, Any]) -> Values:
        """The outputs of the (sub-)pipeline itself."""
        outputs = Values()
        for name, source in spec.get("parameters", {}).items():
            chosen = source["valueFromParameter"]
            made = self.done[chosen["producerSubtask"]].parameters
            outputs.parameters[name] = made[chosen["outputParameterKey"]]
        for name, source in spec.get("artifacts", {}).items():
            chosen = source["artifactSelectors"][-1]
            outputs.artifacts[name] = self.done[chosen["producerSubtask"]].artifacts[chosen["outputArtifactKey"]]
        return outputs


def _found(values: Mapping[str, Any], name: str, otherwise: str) -> Any:
    if name not in values:
        raise Refused(otherwise)
    return values[name]
