"""How large the Argo workflow of a compiled pipeline gets on Kubeflow Pipelines 2.17.

Argo keeps a workflow, with the state of every node, in one Kubernetes object. Once its JSON is over 1 MiB the states
are compressed (gzip, base64) and Kubeflow Pipelines cannot read them any more; if the object is still over 1 MiB then,
the workflow ends in an error. This builds the object of a finished run as the backend and Argo do:

- the arguments hold every component and container once, and the platform's settings once for each component;
- the templates hold the JSON of every task;
- every task has a driver, whose node holds component, task, container and settings, and the patch of the step's pod
  (launcher, executor input, component, source, environment), which the nodes of the step itself repeat;
- every node comes twice, as itself and as its first try: the controller of 2.17 has a retry strategy for all templates.

How far it can be trusted: a real cluster took 6 to 7.6 KB of compressed state for a step, 366 KB for the spec of
coco-b0c5 without GPUs, and began to compress digits-b0c2 after about 13 steps. For the pipelines of that time, with
GPUs, this gave 7.5 to 7.9 KB, 385 KB and 13 steps.

`python -m tests.kubeflow.argo FILE.yaml [name=value …]` prints where the bytes are.
"""

import base64
import gzip
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kubeflow.driver import Driver, Step, read_package
from tests.kubeflow.values import invented

__all__ = ["LIMIT", "Size", "measure"]

LIMIT = 1 << 20  # of an object: the default of Argo's MAX_WORKFLOW_SIZE
LEVEL = 4  # of gzip here; Argo's own writer packs less than level 6, and this gives the most that was measured
SCRATCH = ("kfp-launcher", "gcs-scratch", "s3-scratch", "minio-scratch", "dot-local", "dot-cache", "dot-config")
ORIGIN = {"code": "0.1.0+a0b12415", "data": "s3://csc/data/digits", "fingerprint": "9b43b153f9d357f1" * 4}
RUN_PAGE = "http://mlflow.kubeflow.svc.cluster.local:5000/#/experiments/1/runs/%s"
# What components write about their outputs, by name; every step that is given the output is handed it.
MODEL: dict[str, Any] = {
    "display_name": "digits-b0c2 csc, task 1 of 5",
    "scenario": "digits-b0c2",
    "method": "csc",
    "task": 1,
    "seed": 0,
    "classes": 2,
    "initialisation": "scratch",
    "data": ORIGIN["fingerprint"],
    "code": ORIGIN["code"],
}
FACTS: dict[str, dict[str, Any]] = {
    "metrics": {"CF1": 76.91, "FPR": 13.12, "OF1": 78.13, "forgetting": 7.35, "mAP": 88.54},
    "model": MODEL,
    "registered": {**MODEL, "mlflow_uri": "models:/digits-b0c2-csc/1", "mAP": 88.54},
}


@dataclass(frozen=True)
class Size:
    """What the object of a finished run takes, in bytes.

    Attributes:
        steps: containers that do work, without drivers.
        nodes: states that Argo keeps.
        spec: everything but the states of nodes; never compressed.
        status: the states of nodes.
        compressed_status: the same, compressed.
        inside: of the status before it is compressed, by what it is.
    """

    steps: int
    nodes: int
    spec: int
    status: int
    compressed_status: int
    inside: Mapping[str, int]

    @property
    def raw(self) -> int:
        """Of the object as long as Kubeflow Pipelines can read it."""
        return self.spec + self.status

    @property
    def compressed(self) -> int:
        """Of the object with compressed states."""
        return self.spec + self.compressed_status


def measure(documents: list[dict[str, Any]], **arguments: Any) -> Size:
    """The size of the workflow of a finished run, in which each step ran once and none came from the cache."""
    run = Run(documents, arguments)
    around = {"metadata": run.metadata, "spec": Spec(documents).workflow(run.arguments), "status": run.state}
    nodes = dumps(run.nodes).encode()
    inside: Counter[str] = Counter()
    for node in run.nodes.values():
        parameters = dict(_parameters_of(node))
        inside.update(parameters)
        inside["names, times, children"] += len(dumps(node)) - sum(parameters.values())
    packed = base64.b64encode(gzip.compress(nodes, LEVEL))
    spec = len(dumps(around).encode())
    return Size(run.steps, len(run.nodes), spec, len(nodes), len(packed), dict(inside.most_common()))


def dumps(value: Any) -> str:
    """JSON as Go writes it: without spaces, keys sorted, and <, > and & escaped."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _parameters_of(node: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(what, bytes) of the inputs and outputs of a node."""
    for side in ("inputs", "outputs"):
        for parameter in node.get(side, {}).get("parameters", ()):
            yield f"{side} {parameter['name']}", len(dumps(parameter))


def _parameter(name: str, value: str | None = None, **rest: Any) -> dict[str, Any]:
    return {"name": name, **({} if value is None else {"value": value}), **rest}


def _from(name: str) -> dict[str, str]:
    return {"path": f"/tmp/outputs/{name}", "default": ""}


def _is_exit(task: Mapping[str, Any]) -> bool:
    return bool(task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED")


def _retries(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters of a step that the cluster is asked to try again."""
    named = {
        "maxRetryCount": "retry-max-count",
        "backoffDuration": "retry-backoff-duration",
        "backoffFactor": "retry-backoff-factor",
        "backoffMaxDuration": "retry-backoff-max-duration",
    }
    return [_parameter(named[key], str(value)) for key, value in task.get("retryPolicy", {}).items()]


class Spec:
    """The spec of the workflow that the backend makes of a compiled pipeline."""

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        driver = Driver(documents, _succeed)
        self.name = driver.pipeline
        self.components = {**driver.spec["components"], "root": driver.spec["root"]}
        self.executors = driver.spec["deploymentSpec"]["executors"]
        self.settings = driver.settings

    def workflow(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        stored: dict[str, Any] = {}
        templates = [*self._machinery()]
        for name, component in self.components.items():
            stored.setdefault(f"components-{self._stored(name)}", component)
            if label := component.get("executorLabel"):
                stored.setdefault(f"implementations-{self._stored(name)}", self.executors[label]["container"])
                if label in self.settings:
                    stored[f"kubernetes-{name}"] = self.settings[label]
            else:
                templates += self._templates(name)
        root = {"componentRef": {"name": "root"}}
        given = [_parameter("runtime-config", dumps({"parameterValues": arguments}))]
        templates.append(_template("entrypoint", [*self._dag_tasks("root", root, given)]))
        parameters = [_parameter(name, dumps(value)) for name, value in stored.items()]
        return {"arguments": {"parameters": parameters}, "entrypoint": "entrypoint", "templates": templates}

    def _stored(self, component: str) -> str:
        """Under which name a component and its container are stored; equal containers are stored once."""
        label = self.components[component].get("executorLabel")
        return hashlib.sha256(dumps(self.executors[label]).encode()).hexdigest() if label else component

    def _templates(self, component: str) -> Iterator[dict[str, Any]]:
        """Of a (sub-)pipeline, of its loops, and of the steps that run after it whatever becomes of it."""
        tasks: list[dict[str, Any]] = []
        for name, task in self.components[component]["dag"]["tasks"].items():
            called = task["componentRef"]["name"]
            if "parameterIterator" in task:
                yield _template(f"{called}-iteration", [*self._dag_tasks("iteration-item", task)])
                yield _template(f"{called}-{name}-iterator", [*self._dag_tasks("iteration", task)])
                tasks.append(_task(name, f"{called}-{name}-iterator", [_parameter("parent-dag-id", "{{inputs}}")]))
            elif "dag" in self.components[called]:
                tasks += self._dag_tasks(name, task)
            elif _is_exit(task):
                yield _template(f"exit-hook-{component}-{name}", [*self._step_tasks(name, task)])
            else:
                tasks += self._step_tasks(name, task)
        yield _template(component, tasks)

    def _dag_tasks(
        self, name: str, task: Mapping[str, Any], given: list[dict[str, Any]] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The driver of a sub-pipeline, and the sub-pipeline."""
        component = task["componentRef"]["name"]
        stored = _parameter("component", f"{{{{workflow.parameters.components-{self._stored(component)}}}}}")
        parent = _parameter("parent-dag-id", "{{inputs.parameters.parent-dag-id}}")
        inputs = given or [_parameter("task", dumps(task)), _parameter("task-name", name)]
        yield _task(f"{name}-driver", "system-dag-driver", [stored, parent, *inputs], task.get("dependentTasks", ()))
        made = f"{{{{tasks.{name}-driver.outputs.parameters.%s}}}}"
        inputs = [_parameter("parent-dag-id", made % "execution-id"), _parameter("condition", made % "condition")]
        yield _task(name, component, inputs, [f"{name}-driver"])

    def _step_tasks(self, name: str, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The driver of a step, and the step."""
        component = task["componentRef"]["name"]
        argument = "{{workflow.parameters.%s}}"
        inputs = [
            _parameter("component", argument % f"components-{self._stored(component)}"),
            _parameter("task", dumps(task)),
            _parameter("container", argument % f"implementations-{self._stored(component)}"),
            _parameter("task-name", name),
            _parameter("parent-dag-id", "{{inputs.parameters.parent-dag-id}}"),
            _parameter("kubernetes-config", argument % f"kubernetes-{component}"),
        ]
        yield _task(f"{name}-driver", "system-container-driver", inputs, task.get("dependentTasks", ()))
        made = f"{{{{tasks.{name}-driver.outputs.parameters.%s}}}}"
        inputs = [
            _parameter("pod-spec-patch", made % "pod-spec-patch"),
            _parameter("cached-decision", made % "cached-decision", default="false"),
            *_retries(task),
        ]
        yield _task(name, "system-container-executor", inputs, [f"{name}-driver"])

    def _machinery(self) -> Iterator[dict[str, Any]]:
        """The templates that every workflow has: drivers, and steps with and without retries."""
        names = ("component", "task", "container", "task-name", "parent-dag-id", "iteration-index", "kubernetes-config")
        results = ("pod-spec-patch", "cached-decision", "condition", "execution-id", "iteration-count")
        arguments = ["--pipeline_name", self.name, *(f"--{name} {{{{inputs.parameters.{name}}}}}" for name in names)]
        limits = {"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "100m", "memory": "64Mi"}}
        for template in ("system-container-driver", "system-dag-driver"):
            yield {
                "name": template,
                "container": {"args": arguments, "command": ["driver"], "image": "kfp-driver", "resources": limits},
                "inputs": {"parameters": [_parameter(name) for name in names]},
                "outputs": {"parameters": [_parameter(name, valueFrom=_from(name)) for name in results]},
            }
        mounts = [{"mountPath": f"/{name}", "name": name} for name in SCRATCH]
        for template in ("system-container-impl", "retry-system-container-impl"):
            yield {
                "name": template,
                "container": {"command": ["overridden"], "image": "overridden", "volumeMounts": mounts},
                "initContainers": [{"command": ["launcher-v2"], "image": "kfp-launcher", "resources": limits}],
                "podSpecPatch": "{{inputs.parameters.pod-spec-patch}}",
                "volumes": [{"emptyDir": {}, "name": name} for name in SCRATCH],
            }


def _template(name: str, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    inputs = {"parameters": [_parameter("parent-dag-id")]}
    return {"name": name, "inputs": inputs, "outputs": {}, "metadata": {}, "dag": {"tasks": tasks}}


def _task(name: str, template: str, parameters: list[dict[str, Any]], after: Any = ()) -> dict[str, Any]:
    depends = " && ".join(f"{before}.Succeeded" for before in after)
    return {"name": name, "template": template, "arguments": {"parameters": parameters}, "depends": depends}


def _succeed(step: Step) -> dict[str, Any]:
    """What a step leaves, as long as in a real run."""
    outputs = step.component.get("outputDefinitions", {})
    facts = {name: FACTS[name] for name in outputs.get("artifacts", {}) if name in FACTS}
    if "registered" in facts:
        run_id = hashlib.md5(step.path.encode()).hexdigest()
        facts["registered"] = {**facts["registered"], "mlflow_run": RUN_PAGE % run_id}
    return {
        "parameterValues": {name: json.dumps(ORIGIN) for name in outputs.get("parameters", {})},
        "artifacts": {name: {"artifacts": [{"metadata": known}]} for name, known in facts.items()},
    }


class Run:
    """The nodes of a finished run."""

    def __init__(self, documents: list[dict[str, Any]], arguments: Mapping[str, Any]) -> None:
        self.driver = Driver(documents, _succeed)
        defaults = {name: spec.get("defaultValue", invented(spec)) for name, spec in self.driver.declared.items()}
        self.arguments = {**defaults, **arguments}
        self.driver.run(**self.arguments)
        self.launched = {step.path: step for step in self.driver.steps}
        self.steps = len(self.launched)
        self.name = f"{self.driver.pipeline}-x7k2p"
        self.nodes: dict[str, dict[str, Any]] = {}
        entry = self._twice(self.name, "entrypoint", "DAG", "", [])
        self._dag(f"{entry}.root", "", {"componentRef": {"name": "root"}}, entry)

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the object."""
        labels = {"pipeline/runid": self.driver.run_id, "workflows.argoproj.io/phase": "Succeeded"}
        return {"name": self.name, "namespace": "kubeflow", "labels": labels}

    @property
    def state(self) -> dict[str, Any]:
        """Of the workflow itself, which is never compressed."""
        pods = {name: True for name, node in self.nodes.items() if node["type"] == "Pod"}
        return {"phase": "Succeeded", "taskResultsCompletionStatus": pods}

    def _component(self, task: Mapping[str, Any]) -> dict[str, Any]:
        name = task["componentRef"]["name"]
        component: dict[str, Any] = self.driver.spec["components"].get(name, self.driver.spec["root"])
        return component

    def _dag(self, node: str, path: str, task: Mapping[str, Any], boundary: str, index: int = -1) -> None:
        """A sub-pipeline: its driver, itself, and its tasks."""
        self._dag_driver(f"{node}-driver", task, boundary, index)
        template = task["componentRef"]["name"]
        inside = self._twice(node, template, "DAG", boundary, [_parameter("parent-dag-id", str(len(self.nodes)))])
        for name, inner in self._component(task)["dag"]["tasks"].items():
            here = f"{path}/{name}".lstrip("/")
            if "parameterIterator" in inner:
                self._loop(f"{inside}.{name}", here, inner, inside)
            elif "dag" in self._component(inner):
                self._dag(f"{inside}.{name}", here, inner, inside)
            elif _is_exit(inner):
                before = inner["dependentTasks"][0]
                parent = [_parameter("parent-dag-id", "1")]
                hook = self._twice(f"{inside}.{before}.onExit", f"exit-hook-{template}-{name}", "DAG", inside, parent)
                self._step(f"{hook}.{name}", self.launched[here], inner, hook)
            else:
                self._step(f"{inside}.{name}", self.launched[here], inner, inside)

    def _loop(self, node: str, path: str, task: Mapping[str, Any], boundary: str) -> None:
        """A loop: its driver, and for each item a sub-pipeline whose driver is handed all items again."""
        template = task["componentRef"]["name"]
        parent = _parameter("parent-dag-id", "1")
        inside = self._twice(node, f"{template}-iterator", "DAG", boundary, [parent])
        self._dag_driver(f"{inside}.iteration-driver", task, inside)
        self._node(f"{inside}.iteration-iterations", f"{template}-iteration", "TaskGroup", inside, {})
        for index, _ in enumerate(json.loads(task["parameterIterator"]["items"]["raw"])):
            inputs = [parent, _parameter("iteration-index", str(index))]
            turn = f"{inside}.iteration-iterations({index}:{index})"
            turn = self._twice(turn, f"{template}-iteration", "DAG", inside, inputs)
            self._dag(f"{turn}.iteration-item", f"{path}[{index}]", task, turn, index)

    def _dag_driver(self, node: str, task: Mapping[str, Any], boundary: str, index: int = -1) -> None:
        is_root = task["componentRef"]["name"] == "root"
        runtime = dumps({"parameterValues": self.arguments}) if is_root else ""
        inputs = [
            _parameter("component", dumps(self._component(task))),
            _parameter("runtime-config", runtime, default=""),
            _parameter("task", "" if is_root else dumps(task), default=""),
            _parameter("task-name", node.rsplit(".", 1)[-1], default=""),
            _parameter("parent-dag-id", str(len(self.nodes)), default="0"),
            _parameter("iteration-index", str(index), default="-1"),
            _parameter("driver-type", "ROOT_DAG" if is_root else "DAG", default="DAG"),
        ]
        made = {"execution-id": str(len(self.nodes)), "iteration-count": "0", "condition": "nil"}
        outputs = [_parameter(name, value, valueFrom=_from(name)) for name, value in made.items()]
        self._twice(node, "system-dag-driver", "Pod", boundary, inputs, outputs)

    def _step(self, node: str, step: Step, task: Mapping[str, Any], boundary: str) -> None:
        """A step: its driver, the sub-pipeline around its container, and the container."""
        settings = self.driver.settings.get(step.component["executorLabel"], {})
        inputs = [
            _parameter("component", dumps(step.component)),
            _parameter("task", dumps(task)),
            _parameter("container", dumps(step.container)),
            _parameter("task-name", node.rsplit(".", 1)[-1]),
            _parameter("parent-dag-id", str(len(self.nodes))),
            _parameter("iteration-index", "-1", default="-1"),
            _parameter("kubernetes-config", dumps(settings) if settings else "", default=""),
        ]
        patch = _parameter("pod-spec-patch", dumps(self._pod(step, settings)))
        outputs = [
            {**patch, "valueFrom": _from("pod-spec-patch")},
            _parameter("cached-decision", "false", default="false", valueFrom=_from("cached-decision")),
            _parameter("condition", "nil", valueFrom=_from("condition")),
        ]
        self._twice(f"{node}-driver", "system-container-driver", "Pod", boundary, inputs, outputs)
        retries = _retries(task)
        kind = "retry-system-container" if retries else "system-container"
        inputs = [patch, _parameter("cached-decision", "false", default="false"), *retries]
        inside = self._twice(node, f"{kind}-executor", "DAG", boundary, inputs)
        self._twice(f"{inside}.executor", f"{kind}-impl", "Pod", inside, [patch, *retries])

    def _pod(self, step: Step, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The patch of a step's pod; what the platform sets is about as long in it as where it comes from."""
        options = {
            "pipeline_name": self.driver.pipeline,
            "run_id": self.driver.run_id,
            "execution_id": str(len(self.nodes)),
            "executor_input": dumps(step.handed),
            "component_spec": dumps(step.component),
            "pod_name": "$(KFP_POD_NAME)",
            "pod_uid": "$(KFP_POD_UID)",
            "mlmd_server_address": "metadata-grpc-service.kubeflow.svc.cluster.local",
            "mlmd_server_port": "8080",
            "publish_logs": "true",
        }
        launcher = ["/kfp-launcher/launch", *(word for key, value in options.items() for word in (f"--{key}", value))]
        container = {
            **{key: step.container[key] for key in ("image", "env", "resources") if key in step.container},
            "name": "main",
            "command": [*launcher, "--"],
            "args": [*step.container["command"], *step.container["args"]],
        }
        return {"containers": [container], **settings}

    def _twice(
        self,
        name: str,
        template: str,
        kind: str,
        boundary: str,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]] | None = None,
    ) -> str:
        """Add a node and its first try; return the name of the try, which is the boundary of what runs in it."""
        first = f"{name}(0)"
        rest: dict[str, Any] = {"inputs": {"parameters": inputs}} if inputs else {}
        if kind == "Pod":
            log = f"private-artifacts/kubeflow/{self.name}/2026/11/17/{self._id(first)}/main.log"
            rest["outputs"] = {"exitCode": "0", "artifacts": [{"name": "main-logs", "s3": {"key": log}}]}
            if outputs:
                rest["outputs"]["parameters"] = outputs
        self._node(name, template, "Retry", boundary, rest, first)
        host = {"hostNodeName": "worker-01.example.com", "taskResultSynced": True} if kind == "Pod" else {}
        self._node(first, template, kind, boundary, {**rest, **host, "nodeFlag": {"retried": True}})
        return first

    def _node(
        self, name: str, template: str, kind: str, boundary: str, rest: Mapping[str, Any], child: str = ""
    ) -> None:
        second = len(self.nodes)
        time = f"2026-11-17T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
        node = self._id(name)
        self.nodes[node] = {
            "id": node,
            "name": name,
            "displayName": name.rsplit(".", 1)[-1],
            "type": kind,
            "templateName": template,
            "templateScope": f"local/{self.name}",
            "phase": "Succeeded",
            "boundaryID": self._id(boundary),
            "startedAt": time,
            "finishedAt": time,
            "progress": "1/1",
            "resourcesDuration": {"cpu": second % 97, "memory": second * 7919 % 9973},
            "children": [self._id(child or f"{name}.next")],
            **rest,
        }

    def _id(self, name: str) -> str:
        """As Argo makes it, from the FNV-1a hash of the name; the object lists its nodes in the order of their ids."""
        value = 0x811C9DC5
        for byte in name.encode():
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
        return f"{self.name}-{value}"


def main(words: list[str]) -> None:
    """Print where the bytes of a compiled pipeline's workflow are."""
    size = measure(read_package(Path(words[0])), **dict(word.split("=", 1) for word in words[1:]))
    print(f"{size.steps} steps, {size.nodes} nodes")
    for title, count in (
        ("spec, never compressed", size.spec),
        ("states of nodes", size.status),
        *((f"  {what}", count) for what, count in size.inside.items()),
        ("states, compressed", size.compressed_status),
        ("object", size.raw),
        ("object, states compressed", size.compressed),
    ):
        print(f"{title:36}{count:12,} bytes{count / size.steps:10,.0f} a step{count / LIMIT:8.1%} of the limit")


if __name__ == "__main__":
    main(sys.argv[1:])
