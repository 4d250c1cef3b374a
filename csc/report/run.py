"""A finished scenario run, as every table, figure and page takes it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from csc.errors import BadData

__all__ = ["Run", "TaskResult", "printable"]

_NEEDED = ("mAP", "CF1", "OF1", "CP", "CR", "OP", "OR", "FPR", "forgetting", "images", "threshold", "AP", "confidence")


@dataclass(frozen=True)
class TaskResult:
    """One task of a run, with the metrics of the model after it.

    Attributes:
        task: its number, from 1.
        new: classes taught in it.
        seen: classes taught up to and including it.
        metrics: as `csc.metrics.evaluate` returns them.
        train_images: images it was trained on.
        seconds: time its training took.
    """

    task: int
    new: tuple[str, ...]
    seen: tuple[str, ...]
    metrics: dict[str, Any]
    train_images: int
    seconds: float

    def __post_init__(self) -> None:
        if missing := [name for name in _NEEDED if name not in self.metrics]:
            raise BadData(f"task {self.task}: its metrics lack {', '.join(missing)}; evaluate the task again")
        if missing := [name for name in self.seen if name not in self.metrics["AP"]]:
            raise BadData(f"task {self.task}: no AP of {', '.join(missing)}; evaluate the task again")


@dataclass(frozen=True)
class Run:
    """A scenario run: what it was made from, and its tasks in order.

    Attributes:
        scenario: name such as `voc-b0c4`.
        method: name such as `csc`.
        seed: of all random choices.
        initialisation: where the first weights came from.
        data_fingerprint: of the data set, in hex.
        code_version: of this library.
        tasks: the finished tasks, at least one.
        held_out: not 0 if it was tested on held-out training images, of so many images one.
    """

    scenario: str
    method: str
    seed: int
    initialisation: str
    data_fingerprint: str
    code_version: str
    tasks: tuple[TaskResult, ...]
    held_out: int = 0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise BadData(f"{self.scenario} {self.method}: no finished task, nothing to report")
        for earlier, task in pairwise(self.tasks):
            if task.task <= earlier.task or task.seen[: len(earlier.seen)] != earlier.seen:
                raise BadData(
                    f"task {task.task}: its seen classes must begin with those of task {earlier.task}, in task order"
                )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Run":
        """Read what `to_json` wrote; a missing or unknown key is named."""
        try:
            tasks = tuple(
                TaskResult(**(dict(task) | {"new": tuple(task["new"]), "seen": tuple(task["seen"])}))
                for task in content["tasks"]
            )
            return cls(**(dict(content) | {"tasks": tasks}))
        except KeyError as error:
            raise BadData(f"run: missing key {error}") from None
        except (TypeError, ValueError) as error:
            raise BadData(f"run: wrong or missing key ({error})") from None

    def to_json(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        tasks = [asdict(task) | {"new": list(task.new), "seen": list(task.seen)} for task in self.tasks]
        return {**asdict(self), "tasks": tasks}

    @property
    def summary(self) -> dict[str, float]:
        """The numbers the paper's tables print: last and average."""
        from csc import metrics

        return metrics.summary([task.metrics for task in self.tasks])

    @property
    def last(self) -> TaskResult:
        """The task whose model is the result."""
        return self.tasks[-1]


def printable(text: str) -> str:
    """Replace characters that a terminal would obey or XML does not allow.

    >>> printable("a" + chr(27) + "b")
    'a�b'
    """
    return "".join(character if character.isprintable() else "�" for character in text)
