"""split_labels: which classes a task brings."""

from csc.artifacts import Origin, Split
from csc.data.dataset import Dataset
from csc.errors import BadScenario
from csc.retry import with_retries
from csc.scenario import Scenario

__all__ = ["split_labels"]


@with_retries
def split_labels(origin: str, scenario: str, task: int, tasks: int, out: str) -> None:
    """Write `split.json` of one task; the pipeline was compiled for so many `tasks`."""
    dataset = Dataset.open(Origin.from_json(origin).data)
    chosen = Scenario.parse(scenario).task(dataset.classes, task)
    if chosen.total != tasks:
        raise BadScenario(
            f"scenario '{scenario}' has {chosen.total} tasks on this data set of {len(dataset.classes)} classes, "
            f"the pipeline was compiled for {tasks}; compile it again with --data"
        )
    Split(scenario, task, tasks, chosen.new, chosen.seen).write(out)
    print(f"task {task}/{tasks}: new classes {', '.join(chosen.new)}; {len(chosen.seen)} seen")
