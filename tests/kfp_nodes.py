"""The nodes of a workflow as Kubeflow Pipelines 2.17 lists them, made from a compiled pipeline.

`tests/kubeflow/recorded` holds what a real server said, and `tests/pipelines/test_run_steps.py` compares. Each node is
there with its tries, drivers come before what they prepare, a reused step has an executor that was skipped, after a
failure the rest is left out, and every step that was executed and may be cached leaves an entry without a name.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

NEVER = "0001-01-01T00:00:00Z"
EPOCH = "1970-01-01T00:00:00Z"


@dataclass(eq=False)
class Task:
    """A task of a pipeline, with those inside it."""

    name: str
    key: tuple[str, ...]
    after: tuple[str, ...] = ()
    cached: bool = True
    driver: bool = True
    container: bool = False
    inner: list["Task"] = field(default_factory=list)
    at_exit: list["Task"] = field(default_factory=list)

    def steps(self) -> list["Task"]:
        """The steps below it, in the order in which they are executed."""
        below = [step for task in (*self.inner, *self.at_exit) for step in task.steps()]
        return [self] if self.container else below


@dataclass
class Scene:
    """How far a run has come, and what happened on its way; steps are counted from 0.

    Attributes:
        begun: how many steps have begun. The last of them runs, unless there are no more.
        failing: the step that fails.
        tries: how many tries a step took, if more than one.
        reused: steps that are taken from the cache.
        pending: whether the pod of the last step waits.
        driving: whether the last step has not begun yet, only its driver.
    """

    begun: int
    failing: int | None = None
    tries: Mapping[int, int] = field(default_factory=dict)
    reused: frozenset[int] = frozenset()
    pending: bool = False
    driving: bool = False


def pipeline_tree(spec: dict[str, Any]) -> Task:
    """All tasks of a pipeline."""
    return Task("root", ("root",), inner=_tasks(spec["root"]["dag"]["tasks"], ("root",), spec))


def _tasks(tasks: dict[str, Any], key: tuple[str, ...], spec: dict[str, Any]) -> list[Task]:
    found: dict[str, Task] = {}
    for name in _ordered(tasks):
        about = tasks[name]
        at_exit = about.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
        after = tuple(about.get("dependentTasks", ()))
        below = (*key, f"{after[0]}.onExit", name) if at_exit else (*key, name)
        task = _task(name, below, about, spec)
        if at_exit:
            found[after[0]].at_exit.append(task)
        else:
            task.after = after
            found[name] = task
    return list(found.values())


def _task(name: str, key: tuple[str, ...], about: dict[str, Any], spec: dict[str, Any]) -> Task:
    component = spec["components"][about["componentRef"]["name"]]
    inside = component.get("dag", {}).get("tasks")
    if inside is None:
        return Task(name, key, cached=about.get("cachingOptions", {}).get("enableCache", False), container=True)
    if "parameterIterator" not in about:
        return Task(name, key, inner=_tasks(inside, key, spec))
    loop = Task(name, key, driver=False)
    for index in range(len(json.loads(about["parameterIterator"]["items"]["raw"]))):
        turn = f"iteration-iterations({index}:{index})"
        item = (*key, turn, "iteration-item")
        inner = [Task("iteration-item", item, inner=_tasks(inside, item, spec))]
        loop.inner.append(Task(turn, (*key, turn), driver=False, inner=inner))
    return loop


def _ordered(tasks: dict[str, Any]) -> Iterator[str]:
    left = dict(tasks)
    while left:
        ready = [name for name, task in left.items() if not set(task.get("dependentTasks", ())) & left.keys()]
        assert ready, "the pipeline has a circle"
        for name in sorted(ready):
            yield name
            del left[name]


class Workflow:
    """The nodes of one moment."""

    def __init__(self, root: Task, name: str, scene: Scene, tries: bool = True) -> None:
        """Make the nodes.

        Args:
            root: the pipeline.
            name: of the workflow.
            scene: how far it has come.
            tries: whether the workflow controller has a retry strategy for everything, as the recorded one had.
        """
        self.name, self.scene, self.order = name, scene, root.steps()
        self._nodes: dict[str, dict[str, Any]] = {}
        self._children: dict[str, list[str]] = {}
        failed = scene.failing is not None and scene.begun > scene.failing + 1
        self.state = "FAILED" if failed else "SUCCEEDED" if scene.begun > len(self.order) else "RUNNING"
        times = 0.0, float(min(scene.begun, len(self.order)))
        top = f"{name}(0)"
        self._add(name, self.state, times, [top])
        self._add(top, self.state, times, [f"{top}.root-driver"])
        self._driven(root, top, [])
        if not tries:
            self._drop_tries()
        for path, node in self._nodes.items():
            if there := [{"pod_name": self._id(child)} for child in self._children[path] if child in self._nodes]:
                node["child_tasks"] = there

    def _drop_tries(self) -> None:
        """Let every node stand for its only try."""
        for path in [path for path in self._nodes if path.endswith("(0)")]:
            single, node = path.removesuffix("(0)"), self._nodes.pop(path)
            self._nodes[single]["state"] = node["state"]
            self._children[single] = self._children.pop(path)
        self._nodes = {path.replace("(0)", ""): node for path, node in self._nodes.items()}
        self._children = {
            path.replace("(0)", ""): [child.replace("(0)", "") for child in children]
            for path, children in self._children.items()
        }

    def details(self) -> list[dict[str, Any]]:
        """The nodes, in no useful order, and the entries of the cache."""
        return sorted([*self._nodes.values(), *self.entries()], key=lambda detail: detail["task_id"])

    def entries(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """What the steps that were executed have left in the cache."""
        for index, step in enumerate(self.order[first:], start=first):
            if step.cached and index not in self.scene.reused and self._state(step) == "SUCCEEDED":
                start, end = stamp(index + 0.25), stamp(index + 0.95)
                times = {"create_time": start, "start_time": start, "end_time": end}
                yield {"task_id": str(uuid.uuid4()), **times, "execution_id": str(index + 2)}

    def pod(self, key: tuple[str, ...], template: str = "system-container-impl") -> str:
        """The name of the last pod of a step."""
        index = next(number for number, step in enumerate(self.order) if step.key == key)
        last = self.scene.tries.get(index, 1) - 1
        path = f"{self.name}(0)" + "".join(f".{name}(0)" for name in key) + f".executor({last})"
        return f"{self.name}-{template}-{_fnv(path)}"

    def _driven(self, task: Task, above: str, after: list[str]) -> None:
        """A task with its driver, below the try of another one; `after` are the drivers that come after it."""
        path, state, (start, end) = f"{above}.{task.name}", self._state(task), self._times(task)
        if task.driver and state is None:
            self._add(f"{path}-driver", "", (start, start), [path])
            self._add(path, "", (start, start), after)
        elif task.driver and state:
            prepared = start + 0.2
            state = "DRIVING" if self._driving(task) else state
            node, pod = ("RUNNING", "PENDING") if state == "DRIVING" else ("SUCCEEDED", "SUCCEEDED")
            self._add(f"{path}-driver", node, (start, prepared), [f"{path}-driver(0)"])
            self._add(f"{path}-driver(0)", pod, (start, prepared), [path])
            start = prepared
        if state and state != "DRIVING":
            if task.container:
                self._container(task, path, state, (start, end), after)
            else:
                self._dag(task, path, state, (start, end), after)

    def _container(self, task: Task, path: str, state: str, times: tuple[float, float], after: list[str]) -> None:
        index = self.order.index(task)
        if index in self.scene.reused:
            times = times[0], times[0]
        self._add(path, state, times, [f"{path}(0)"])
        self._add(f"{path}(0)", state, times, [f"{path}(0).executor", *after])
        if index in self.scene.reused:
            self._add(f"{path}(0).executor", "SKIPPED", times, [])
            return
        tries = self.scene.tries.get(index, 1)
        pods = [f"{path}(0).executor({number})" for number in range(tries)]
        self._add(f"{path}(0).executor", state, times, pods)
        for pod in pods[:-1]:
            self._add(pod, "FAILED", times, [])
        waits = state == "RUNNING" and self.scene.pending
        self._add(pods[-1], "PENDING" if waits else state, times, [])

    def _dag(self, task: Task, path: str, state: str, times: tuple[float, float], after: list[str]) -> None:
        inner = {one.name: f"{path}(0).{one.name}{'-driver' if one.driver else ''}" for one in task.inner}
        first = [inner[one.name] for one in task.inner if not one.after]
        hook = f"{path}.onExit"
        self._add(path, state, times, [f"{path}(0)", *([hook] if task.at_exit else [])])
        self._add(f"{path}(0)", state, times, [*first, *after])
        for one in task.inner:
            self._driven(one, f"{path}(0)", [inner[next_.name] for next_ in task.inner if one.name in next_.after])
        if task.at_exit and (state := self._state(task.at_exit[0])):
            times = self._times(task.at_exit[0])
            self._add(hook, state, times, [f"{hook}(0)"])
            self._add(f"{hook}(0)", state, times, [f"{hook}(0).{one.name}-driver" for one in task.at_exit])
            for one in task.at_exit:
                self._driven(one, f"{hook}(0)", [])

    def _add(self, path: str, state: str, times: tuple[float, float], children: list[str]) -> None:
        short = path.rpartition(").")[2] if ")." in path else path
        node = {
            "task_id": str(uuid.uuid4()),
            "display_name": short,
            "create_time": stamp(0),
            "start_time": stamp(times[0]),
            "end_time": NEVER if state in ("RUNNING", "PENDING") else stamp(times[1]),
            "state_history": [{"update_time": stamp(times[0]), **({"state": state} if state else {})}],
        }
        self._nodes[path] = node | ({"state": state} if state else {})
        self._children[path] = children

    def _steps(self, task: Task) -> list[int]:
        return [self.order.index(step) for step in task.steps()]

    def _driving(self, task: Task) -> bool:
        """Whether the driver of a task is all that has begun of it."""
        return self.scene.driving and self.scene.begun <= len(self.order) and min(self._steps(task)) == self._last()

    def _last(self) -> int:
        return self.scene.begun - 1

    def _state(self, task: Task) -> str | None:
        """The state of a task; empty before it has begun, none if it is left out after a failure."""
        mine, failing = self._steps(task), self.scene.failing
        if self.state == "FAILED" and failing in mine:
            return "FAILED"
        if self.state == "FAILED" and min(mine) > failing:
            return "SUCCEEDED" if _at_exit(task) else None
        if min(mine) > self._last():
            return ""
        return "SUCCEEDED" if max(mine) < self._last() else "RUNNING"

    def _times(self, task: Task) -> tuple[float, float]:
        mine = self._steps(task)
        if self._state(task) is None or (self.state == "FAILED" and _at_exit(task)):
            mine = [self._last()]
        return float(min(mine)), float(max(mine) + 1)

    def _id(self, path: str) -> str:
        return f"{self.name}-{_fnv(path)}"


def _at_exit(task: Task) -> bool:
    return any(name.endswith(".onExit") for name in task.key)


def _fnv(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) % 2**32
    return value


def stamp(minutes: float) -> str:
    moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=round(minutes * 60))
    return moment.isoformat().replace("+00:00", "Z")
