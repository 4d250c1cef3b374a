"""What a compiled pipeline says about the steps of its runs: what people call them, and the template of their pods."""

import json
import re
from collections.abc import Iterator

from csc.pipelines.cluster.answers import Component, Platform, PlatformExecutor, Spec, Task
from csc.pipelines.cluster.workflow import Key
from csc.report.text import single_line

__all__ = ["loops", "pod_template", "title_of"]


def title_of(key: Key, spec: Spec) -> str:
    """What people call a step: its task, and in a study the run that it belongs to, before its name.

    Without a pipeline the names in the workflow are all there is.
    """
    if not spec.root.dag.tasks:
        return single_line(" · ".join(key[1:]) or key[-1])
    parts = []
    loop = Task()
    for name, task in _walk(key, spec):
        if task.parameter_iterator:
            loop = task
            parts.append(task.task_info.name)
        elif iteration := re.search(r"\((\d+):", name):
            parts.append(_iteration(loop, int(iteration[1])))
        elif number := re.fullmatch(r"task-(\d+)", task.task_info.name):
            parts.append(f"task {int(number[1])}")
        elif task.component_ref.name and name == key[-1]:
            parts.append(name)
    return single_line(" · ".join(parts) or key[-1])


def loops(spec: Spec) -> Iterator[tuple[str, list[str]]]:
    """The loops of a study: the scenario of each, and the settings of its runs as JSON."""
    for component in (spec.root, *spec.components.values()):
        for task in component.dag.tasks.values():
            if task.parameter_iterator:
                yield task.task_info.name, _items(task)


def pod_template(key: Key, spec: Spec, driver: bool) -> str:
    """The template that Kubeflow's compiler makes the pods of a step from, or the pod of its driver."""
    task = [Task(), *(task for _, task in _walk(key, spec))][-1]
    label = _component(task, spec).executor_label
    if driver:
        return f"system-{'container' if label else 'dag'}-driver"
    template = "retry-system-container-impl" if task.retry_policy else "system-container-impl"
    executors = spec.platforms.get("kubernetes", Platform()).deployment_spec.executors
    metadata = executors.get(label, PlatformExecutor()).pod_metadata
    return f"metadata-{len(metadata.annotations)}-{len(metadata.labels)}-{template}" if metadata else template


def _walk(key: Key, spec: Spec) -> Iterator[tuple[str, Task]]:
    """The names of a key below the root, each with its task; what loops and exit handlers add has an empty one."""
    inside = spec.root.dag.tasks
    for name in key[1:]:
        task = inside.get(name, Task())
        yield name, task
        if task.component_ref.name:
            inside = _component(task, spec).dag.tasks


def _component(task: Task, spec: Spec) -> Component:
    return spec.components.get(task.component_ref.name, Component())


def _iteration(loop: Task, index: int) -> str:
    """What people call one iteration of a study's loop: its method and seed."""
    try:
        settings = json.loads(_items(loop)[index])
        return f"{settings['method']} seed {settings['seed']}"
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return f"run {index + 1}"


def _items(loop: Task) -> list[str]:
    try:
        items = json.loads(loop.parameter_iterator["items"]["raw"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [str(item) for item in items] if isinstance(items, list) else []
