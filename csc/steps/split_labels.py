"""split_labels: which classes a task brings."""

from pathlib import Path
from typing import Any

from csc.data.dataset import Dataset
from csc.errors import BadScenario
from csc.retry import with_retries
from csc.scenario import Scenario, Task
from csc.steps.ingest import Origin
from csc.storage import read_json, write_json

__all__ = ["read_split", "split_labels"]


@with_retries
def split_labels(origin: str, scenario: str, task: int, tasks: int, out: str) -> None:
    """Write `split.json` of one task.

    Args:
        origin: of the data, from `ingest`.
        scenario: name.
        task: number of the task, from 1.
        tasks: how many tasks the pipeline was compiled for.
        out: file to write.
    """
    dataset = Dataset.open(Origin.from_json(origin).data)
    chosen = Scenario.parse(scenario).task(dataset.classes, task)
    if chosen.total != tasks:
        raise BadScenario(
            f"scenario '{scenario}' has {chosen.total} tasks on this data set of {len(dataset.classes)} classes, "
            f"the pipeline was compiled for {tasks}; compile it again with --data"
        )
    content: dict[str, Any] = {
        "scenario": scenario,
        "task": task,
        "tasks": tasks,
        "new": chosen.new,
        "seen": chosen.seen,
    }
    write_json(Path(out), content)
    print(f"task {task}/{tasks}: new classes {', '.join(chosen.new)}; {len(chosen.seen)} seen")


def read_split(path: str) -> tuple[str, Task]:
    """Read `split.json`: the scenario's name and the task."""
    content = read_json(Path(path))
    try:
        return content["scenario"], Task(
            content["task"], content["tasks"], tuple(content["new"]), tuple(content["seen"])
        )
    except (KeyError, TypeError) as error:
        raise BadScenario(f"{path}: not a split ({error}); make it with the split_labels step") from None
