"""The steps of a run on a cluster, from what its server lists.

Once a workflow has grown over 1 MiB Argo compresses it, the server cannot read its nodes any more, and what it lists of
them is how they stood then. Only the entries that steps make in the server's cache still appear, without a name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from csc.pipelines.cluster.terminal import duration, printable
from csc.pipelines.cluster.titles import Spec, pod_template, step_keys, title_of
from csc.pipelines.cluster.workflow import (
    DRIVER,
    Key,
    Path,
    find_paths,
    is_try,
    key_of,
    nodes_by_path,
    pod_name,
    tries_of,
)

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail as Detail
    from kfp_server_api import V2beta1Run

__all__ = ["ENDED", "FAILED", "REUSED", "STARTING", "RunSteps", "Step", "elapsed", "steps_of"]

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
FAILED = ("FAILED", "CANCELED")
REUSED = "REUSED"  # taken from the cache; the server says SUCCEEDED, and SKIPPED of its executor
STARTING = "STARTING"  # only its driver runs
_NOT_BEGUN = (None, "", "RUNTIME_STATE_UNSPECIFIED")  # nodes that Argo left out after a failure


@dataclass(frozen=True)
class Step:
    """A step that has begun.

    Attributes:
        title: what people call it, `task 2 · train`.
        state: of Kubeflow, or `REUSED` or `STARTING`.
        start: when it began; none if the server does not say.
        seconds: how long it took, 0 while it runs.
        error: what the server says about a failure, usually nothing.
        tries: how many pods it had so far.
        pod: the name of the last of them; empty if it had none, or if the server does not give ids.
        key: its names in the workflow.
    """

    title: str
    state: str
    start: datetime | None = None
    seconds: float = 0.0
    error: str = ""
    tries: int = 1
    pod: str = ""
    key: Key = ()

    def __str__(self) -> str:
        took = f" after {duration(self.seconds)}" if self.state in ("SUCCEEDED", "FAILED") else ""
        tries = f", try {self.tries}" if self.tries > 1 else ""
        return f"{self.title:<24} {printable(self.state.lower())}{took}{tries}{f': {self.error}' if self.error else ''}"


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run so far, in the order in which they began.

    Attributes:
        steps: those that the server names.
        named: whether it still names them. If not, steps that had not ended when it stopped are left out.
        unnamed: how many more have finished since then; steps that are reused or never cached do not count.
    """

    steps: list[Step] = field(default_factory=list)
    named: bool = True
    unnamed: int = 0

    @property
    def failed(self) -> Step | None:
        """The first step that failed."""
        return next((step for step in self.steps if step.state in FAILED), None)


def steps_of(run: "V2beta1Run", spec: Spec) -> RunSteps:
    """The steps of a run so far.

    Args:
        run: as the server describes it.
        spec: its pipeline; without one, steps are called by their names in the workflow.
    """
    details = list(run.run_details.task_details or ()) if run.run_details else []
    named = sorted((detail for detail in details if detail.display_name), key=_age)  # of a node listed twice, the newer
    paths = find_paths(named)
    steps = list(_from_paths(named, paths, spec) if paths else _by_order(named, spec))
    _mark_waiting(steps, named)
    steps.sort(key=lambda step: (step.start is None, step.start, step.key))
    ended = [step for step in steps if step.state in (*ENDED, REUSED)]
    unnamed = _unnamed(details)
    if unnamed or (run.state in ("SUCCEEDED", "FAILED") and len(ended) < len(steps)):
        return RunSteps(ended, False, unnamed)
    return RunSteps(steps)


def elapsed(start: datetime | None, end: datetime | None) -> float:
    """Seconds between two times; 0 if one of them is not set, which the server writes as 1970 or as the year 1."""
    begin, finish = _time(start), _time(end)
    return max(0.0, (finish - begin).total_seconds()) if begin and finish else 0.0


def _from_paths(named: "Sequence[Detail]", paths: Mapping[str, Path], spec: Spec) -> Iterator[Step]:
    """Steps by the paths of their nodes."""
    executors: dict[Key, list[Path]] = defaultdict(list)
    for path in paths.values():
        if ".executor" in path:
            executors[key_of(path)[:-1]].append(path)
    skipped = {_times(detail) for detail in named if (detail.display_name, detail.state) == ("executor", "SKIPPED")}
    for path, detail in nodes_by_path(named, paths).items():
        key = key_of(path)
        if not key or is_try(path) or detail.state in _NOT_BEGUN:
            continue
        if key in executors:
            tries = [executor for executor in executors[key] if is_try(executor)]
            if detail.state == "SUCCEEDED" and not tries and _times(detail) in skipped:
                yield _step(detail, REUSED, key, spec)
            else:
                yield _step(detail, str(detail.state), key, spec, tries or executors[key])
        elif key[-1].endswith(DRIVER) and detail.state != "SUCCEEDED":
            state = str(detail.state) if detail.state in ENDED else STARTING
            tries = [found for found in paths.values() if found[:-1] == path]
            yield _step(detail, state, (*key[:-1], key[-1].removesuffix(DRIVER)), spec, tries or [path])


def _step(detail: "Detail", state: str, key: Key, spec: Spec, pods: Sequence[Path] = ()) -> Step:
    """A step whose names are known.

    Args:
        detail: the node that tells its state and times: its own or its driver's.
        state: of the step.
        key: its names.
        spec: its pipeline.
        pods: paths of the nodes of its pods, or of its driver's.
    """
    pod = ""
    if pods:
        last = max(pods, key=tries_of)
        pod = pod_name(last, pod_template(key, spec, driver=key_of(last)[-1].endswith(DRIVER)))
    error = printable(detail.error.message or "") if detail.error else ""
    seconds = elapsed(detail.start_time, detail.end_time)
    return Step(title_of(key, spec), state, _time(detail.start_time), seconds, error, max(1, len(pods)), pod, key)


def _by_order(named: "Sequence[Detail]", spec: Spec) -> Iterator[Step]:
    """Steps by their names alone, where the server gives no ids: the third `train` is that of the third task.

    In a study, where scenarios run side by side, it is just the third.
    """
    titles: dict[str, list[str]] = defaultdict(list)
    for key in step_keys(spec):
        in_loop = any(name.startswith("for-loop-") for name in key)
        titles[key[-1]].append("" if in_loop else title_of(key, spec))
    seen: dict[str, int] = defaultdict(int)
    for detail in named:
        name = str(detail.display_name)
        if name in titles and detail.state not in _NOT_BEGUN:
            seen[name] += 1
            known = dict(enumerate(titles[name], start=1)).get(seen[name])
            seconds = elapsed(detail.start_time, detail.end_time)
            title, key = known or f"{name} ({seen[name]})", (name, str(seen[name]))
            yield Step(title, str(detail.state), _time(detail.start_time), seconds, key=key)


def _mark_waiting(steps: list[Step], named: "Sequence[Detail]") -> None:
    """Mark the steps that run for Argo while their pod waits for a node or its image.

    A node of a pod does not tell its step: it is the last that began before the pod, of those with as many tries.
    """
    for detail in named:
        pod = re.fullmatch(r"executor(?:\((\d+)\))?", str(detail.display_name))
        created = _time(detail.start_time)
        if pod and created and detail.state == "PENDING":
            tries = int(pod[1] or 0) + 1
            running = [
                (step.start, index)
                for index, step in enumerate(steps)
                if step.state == "RUNNING" and step.tries == tries and step.start and step.start <= created
            ]
            if running:
                index = max(running)[1]
                steps[index] = replace(steps[index], state="PENDING")


def _unnamed(details: "Sequence[Detail]") -> int:
    """How many entries of the cache were made by steps whose nodes the server does not list.

    A step makes one at its end, which says when it began: then its executor must have been at work.
    """
    executors = [detail for detail in details if detail.display_name == "executor" and _time(detail.start_time)]
    entries = [detail for detail in details if not detail.display_name and detail.execution_id]
    unnamed = 0
    for entry in sorted(entries, key=_age):
        at_work = [executor for executor in executors if _within(_time(entry.start_time), executor)]
        if at_work:
            executors.remove(max(at_work, key=_age))
        else:
            unnamed += 1
    return unnamed


def _within(time: datetime | None, detail: "Detail") -> bool:
    start, end = _time(detail.start_time), _time(detail.end_time)
    return time is not None and start is not None and start <= time and (end is None or time <= end)


def _age(detail: "Detail") -> tuple[bool, datetime | None]:
    """Sorts by the beginning; what has none comes last."""
    start = _time(detail.start_time)
    return start is None, start


def _times(detail: "Detail") -> tuple[datetime | None, datetime | None]:
    return detail.start_time, detail.end_time


def _time(time: datetime | None) -> datetime | None:
    """A time that was set; one without a zone is taken for that of the server, which is UTC."""
    if time is None or time.year <= 1970:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
