"""Watch a run on a cluster: its steps in the words that a local run uses, one line for each change."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfp_server_api import V2beta1PipelineTaskDetail, V2beta1Run

    from csc.pipelines.endpoint import Endpoint

__all__ = ["ENDED", "FAILED", "Step", "follow", "outcome", "steps_of"]

POLL_SECONDS = 5.0
PATIENCE = 60  # looks in a row that may fail
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
FAILED = ("FAILED", "CANCELED")
_HOPELESS = (400, 401, 403, 404)  # what waiting does not heal


@dataclass(frozen=True)
class Step:
    """A step that has begun, or has been passed over."""

    title: str
    state: str
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        took = f" after {duration(self.seconds)}" if self.state in ("SUCCEEDED", "FAILED") else ""
        return f"{self.title:<24} {self.state.lower()}{took}{f': {self.error}' if self.error else ''}"


def steps_of(run: "V2beta1Run", spec: Mapping[str, Any]) -> list[Step]:
    """The steps of a run so far, in the order in which they began.

    The server lists every node of its workflow by name, drivers and containers too. It does not say which sub-pipeline
    a step belongs to, but the tasks of a scenario come one after the other: the third `train` is that of the third
    task. In a study, where scenarios run side by side, it is just the third.
    """
    tasks = spec.get("root", {}).get("dag", {}).get("tasks", {})
    inner = {name for task in tasks.values() for name in _leaves(task, spec)}
    first = _first_task(tasks)
    seen: Counter[str] = Counter()
    steps = []
    for detail in sorted(_details(run), key=lambda detail: _moment(detail.start_time)):
        name = str(detail.display_name)
        if name in inner:
            seen[name] += 1
            number = seen[name]
            steps.append(_step(detail, f"task {first - 1 + number} · {name}" if first else f"{name} ({number})"))
        elif name in tasks and not _inside(tasks[name], spec):
            steps.append(_step(detail, name))
    return steps


def follow(
    endpoint: "Endpoint",
    run_id: str,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> tuple["V2beta1Run", list[Step]]:
    """Say what changes until the run has ended; a server that goes away for a while is waited for.

    Args:
        endpoint: where the run is.
        run_id: of the run.
        say: takes one line for each change.
        pause: waits between two looks.
    """
    run = _patiently(pause, endpoint.run, run_id)
    spec = _patiently(pause, endpoint.spec, run)
    shown: dict[str, str] = {}
    while True:
        steps = steps_of(run, spec)
        for step in steps:
            if shown.get(step.title) != step.state:
                shown[step.title] = step.state
                say(f"{datetime.now():%H:%M:%S}  {step}")
        if run.state in ENDED:
            return run, steps
        pause(POLL_SECONDS)
        run = _patiently(pause, endpoint.run, run_id)


def _patiently(pause: Callable[[float], None], look: Callable[[Any], Any], at: Any) -> Any:
    from csc.pipelines.endpoint import EndpointError

    for _ in range(PATIENCE):
        try:
            return look(at)
        except EndpointError as error:
            if error.status in _HOPELESS:
                raise
        pause(POLL_SECONDS)
    return look(at)


def outcome(run: "V2beta1Run", steps: list[Step]) -> str:
    """One line about where a run stands, with what it failed at."""
    line = f"run {str(run.state or 'PENDING').lower()}"
    if run.state in ENDED and run.finished_at:
        line += f" after {duration(_elapsed(run.created_at, run.finished_at))}"
    failed = next((step.title for step in steps if step.state in FAILED), None)
    why = " ".join(str(run.error.message or "").split()) if run.error else ""
    return line + (f" at {failed}" if failed else "") + (f": {why}" if why and run.state in FAILED else "")


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(42), duration(3720)
    ('42 s', '1 h 2 min')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _inside(task: Mapping[str, Any], spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tasks of a sub-pipeline; none for a step."""
    component = spec.get("components", {}).get(task.get("componentRef", {}).get("name"), {})
    inside: Mapping[str, Any] = component.get("dag", {}).get("tasks", {})
    return inside


def _leaves(task: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[str]:
    """The names of all steps below a sub-pipeline."""
    for name, inner in _inside(task, spec).items():
        if _inside(inner, spec):
            yield from _leaves(inner, spec)
        else:
            yield name


def _first_task(tasks: Mapping[str, Any]) -> int:
    """The number of a scenario's first task; 0 where sub-pipelines are no tasks."""
    names = (re.fullmatch(r"task-(\d+)", task.get("taskInfo", {}).get("name", "")) for task in tasks.values())
    return min((int(name[1]) for name in names if name), default=0)


def _details(run: "V2beta1Run") -> Iterator["V2beta1PipelineTaskDetail"]:
    details = run.run_details.task_details if run.run_details else None
    return (detail for detail in details or () if detail.state not in (None, "RUNTIME_STATE_UNSPECIFIED"))


def _step(detail: "V2beta1PipelineTaskDetail", title: str) -> Step:
    error = " ".join(str(detail.error.message or "").split()) if detail.error else ""
    return Step(title, str(detail.state), _elapsed(detail.start_time, detail.end_time), error)


def _elapsed(start: datetime | None, end: datetime | None) -> float:
    return max(0.0, (_moment(end) - _moment(start)).total_seconds())


def _moment(time: datetime | None) -> datetime:
    return time or datetime.fromtimestamp(0, UTC)
