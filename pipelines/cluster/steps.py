"""How a run on a cluster stands: its steps, from the nodes of the workflow that its server lists.

Over 1 MiB Argo compresses a workflow, which the server cannot read. It then lists the nodes as they stood before, and
of later steps only their entries in its cache, which have no name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from csc.data.progress import duration
from csc.pipelines.cluster.answers import Node, Run, Spec, seconds_between
from csc.pipelines.cluster.titles import pod_template, title_of
from csc.pipelines.cluster.workflow import DRIVER, Key, Path, find_paths, is_try, key_of, own_path, pod_name
from csc.report.text import single_line

__all__ = ["ENDED", "FAILED", "REUSED", "STARTING", "RunStatus", "StepStatus", "run_status"]

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
FAILED = ("FAILED", "CANCELED")
REUSED = "REUSED"  # taken from the cache; the server says SUCCEEDED, and SKIPPED of its executor
STARTING = "STARTING"  # only its driver runs
_NOT_BEGUN = ("", "RUNTIME_STATE_UNSPECIFIED")  # nodes that Argo left out after a failure


@dataclass(frozen=True)
class StepStatus:
    """A step that has begun."""

    title: str  # what people call it, `task 2 · train`
    state: str  # of Kubeflow, or `REUSED` or `STARTING`
    start: datetime | None  # none if the server does not say
    seconds: float  # that it took, 0 while it runs
    error: str  # what the server says about a failure, usually nothing
    tries: int  # how many pods it had so far
    pod: str  # the name of the last of them; empty if it had none
    key: Key  # its names in the workflow

    def __str__(self) -> str:
        took = f" after {duration(self.seconds)}" if self.state in ("SUCCEEDED", "FAILED") else ""
        tries = f", try {self.tries}" if self.tries > 1 else ""
        error = f": {self.error}" if self.error else ""
        return f"{self.title:<24} {single_line(self.state.lower())}{took}{tries}{error}"


@dataclass(frozen=True)
class RunStatus:
    """How a run stands; if its steps are no longer named, those that had not ended before are left out."""

    run: Run  # what the server says of it
    spec: Spec  # its pipeline; without any task if that was deleted
    steps: list[StepStatus]  # those that the server names, in the order in which they began
    named: bool = True  # whether it still names them
    unnamed: int = 0  # how many more have finished since; those that are reused or never cached do not count

    @property
    def failed(self) -> StepStatus | None:
        """The first step that failed."""
        return next((step for step in self.steps if step.state in FAILED), None)


def run_status(run: Run, spec: Spec) -> RunStatus:
    """How a run stands; without its pipeline the steps are called by their names in the workflow."""
    # The oldest first, and last what has not begun.
    listed = sorted(run.run_details.task_details or (), key=lambda node: (node.start is None, node.start))
    nodes = [node for node in listed if node.name]
    steps = list(_steps(nodes, spec))
    _mark_waiting(steps, nodes)
    steps.sort(key=lambda step: (step.start is None, step.start, step.key))
    ended = [step for step in steps if step.state in (*ENDED, REUSED)]
    unnamed = _count_unnamed(listed)
    if unnamed or (run.state in ("SUCCEEDED", "FAILED") and len(ended) < len(steps)):
        return RunStatus(run, spec, ended, False, unnamed)
    return RunStatus(run, spec, steps)


def _steps(nodes: Sequence[Node], spec: Spec) -> Iterator[StepStatus]:
    """Steps by the paths of their nodes; of a node that is listed twice the newer one counts."""
    paths = find_paths(nodes)
    executors: dict[Key, list[Path]] = defaultdict(list)
    for path in paths.values():
        if ".executor" in path:
            executors[key_of(path)[:-1]].append(path)
    skipped = {(node.start, node.end) for node in nodes if (node.name, node.state) == ("executor", "SKIPPED")}
    for path, node in {own_path(node, paths): node for node in nodes}.items():
        key = key_of(path)
        if not key or is_try(path) or node.state in _NOT_BEGUN:
            continue
        if key in executors:
            tries = [executor for executor in executors[key] if is_try(executor)]
            if node.state == "SUCCEEDED" and not tries and (node.start, node.end) in skipped:
                yield _step(node, REUSED, key, spec, [])
            else:
                yield _step(node, node.state, key, spec, tries or executors[key])
        elif key[-1].endswith(DRIVER) and node.state != "SUCCEEDED":
            state = node.state if node.state in ENDED else STARTING
            tries = [found for found in paths.values() if found[:-1] == path]
            yield _step(node, state, (*key[:-1], key[-1].removesuffix(DRIVER)), spec, tries or [path])


def _step(node: Node, state: str, key: Key, spec: Spec, pods: Sequence[Path]) -> StepStatus:
    """A step from the node that tells its times, its own or its driver's, and the paths of the nodes of its pods."""
    pod = ""
    if pods:
        last = max(pods, key=lambda path: [int(part[1:-1]) for part in path if part[0] == "("])  # the newest try
        pod = pod_name(last, pod_template(key, spec, driver=key_of(last)[-1].endswith(DRIVER)))
    took = seconds_between(node.start, node.end)
    error = single_line(node.error.message)
    return StepStatus(title_of(key, spec), state, node.start, took, error, max(1, len(pods)), pod, key)


def _mark_waiting(steps: list[StepStatus], nodes: Sequence[Node]) -> None:
    """Mark the steps that run for Argo while their pod waits for a node or its image.

    A node of a pod does not tell its step: it is the last that began before the pod, of those with as many tries.
    """
    for node in nodes:
        pod = re.fullmatch(r"executor(?:\((\d+)\))?", node.name)
        if pod and node.start and node.state == "PENDING":
            running = [step for step in steps if step.state == "RUNNING" and step.tries == int(pod[1] or 0) + 1]
            before = [(step.start, step.key, step) for step in running if step.start and step.start <= node.start]
            if before:
                last = max(before)[2]
                steps[steps.index(last)] = replace(last, state="PENDING")


def _count_unnamed(listed: Sequence[Node]) -> int:
    """How many entries of the cache were made by steps whose nodes the server does not list.

    A step makes one at its end, which says when it began: then its executor must have been at work.
    """
    executors = [node for node in listed if node.name == "executor" and node.start]
    unnamed = 0
    for entry in (node for node in listed if not node.name and node.cached):
        at_work = [executor for executor in executors if _is_within(entry.start, executor)]
        if at_work:
            executors.remove(at_work[-1])
        else:
            unnamed += 1
    return unnamed


def _is_within(time: datetime | None, node: Node) -> bool:
    return bool(time and node.start and node.start <= time and not (node.end and time > node.end))
