"""What a compiled pipeline says about the steps of its runs: what people call them, and the template of their pods."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from csc.pipelines.cluster.workflow import Key
from csc.report.text import single_line

__all__ = ["Spec", "loops", "pod_template", "title_of"]

Spec = Mapping[str, Any]  # both documents of a compiled pipeline: the pipeline's own keys, and `platforms`
Task = Mapping[str, Any]  # one of `dag.tasks` in it


def title_of(key: Key, spec: Spec) -> str:
    """What people call a step: its task, and in a study the run that it belongs to, before its name.

    Without a pipeline the names in the workflow are all there is.
    """
    if not spec:
        return single_line(" · ".join(key[1:]) or key[-1])
    parts = []
    loop: Task = {}
    for name, task in _walk(key, spec):
        called = str(task.get("taskInfo", {}).get("name", ""))
        if "parameterIterator" in task:
            loop = task
            parts.append(called)
        elif turn := re.search(r"\((\d+):", name):
            parts.append(_turn(loop, int(turn[1])))
        elif number := re.fullmatch(r"task-(\d+)", called):
            parts.append(f"task {int(number[1])}")
        elif task and name == key[-1]:
            parts.append(name)
    return single_line(" · ".join(parts) or key[-1])


def loops(spec: Spec) -> Iterator[tuple[str, list[str]]]:
    """The loops of a study: the scenario of each, and the settings of its runs as JSON."""
    for component in (spec.get("root", {}), *spec.get("components", {}).values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            if "parameterIterator" in task:
                yield str(task.get("taskInfo", {}).get("name", "")), _items(task)


def pod_template(key: Key, spec: Spec, driver: bool = False) -> str:
    """The template that Kubeflow's compiler makes the pods of a step from, or the pod of its driver."""
    tasks = [task for _, task in _walk(key, spec)]
    task = tasks[-1] if tasks else {}
    label = _component(task, spec).get("executorLabel")
    if driver:
        return f"system-{'container' if label else 'dag'}-driver"
    template = "retry-system-container-impl" if task.get("retryPolicy") else "system-container-impl"
    executors = spec.get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
    metadata = executors.get(label, {}).get("podMetadata")
    if metadata is None:
        return template
    return f"metadata-{len(metadata.get('annotations', {}))}-{len(metadata.get('labels', {}))}-{template}"


def _walk(key: Key, spec: Spec) -> Iterator[tuple[str, Task]]:
    """The names of a key below the root, each with its task; what loops and exit handlers add has none."""
    inside = spec.get("root", {}).get("dag", {}).get("tasks", {})
    for name in key[1:]:
        task = inside.get(name, {})
        yield name, task
        if task:
            inside = _component(task, spec).get("dag", {}).get("tasks", {})


def _component(task: Task, spec: Spec) -> Any:
    return spec.get("components", {}).get(task.get("componentRef", {}).get("name"), {})


def _turn(loop: Task, index: int) -> str:
    """What people call one turn of a study's loop: its method and seed."""
    try:
        settings = json.loads(_items(loop)[index])
        return f"{settings['method']} seed {settings['seed']}"
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return f"run {index + 1}"


def _items(loop: Task) -> list[str]:
    try:
        items = json.loads(loop["parameterIterator"]["items"]["raw"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [str(item) for item in items] if isinstance(items, list) else []
