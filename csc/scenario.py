"""Which classes arrive when: the scenarios {Bx-Cy} of multi-label class-incremental learning.

`Bx-Cy` teaches x classes in the base task and y in each later one; with x = 0 the base task also has y.
Classes arrive in the order that the data set gives, which is lexicographic unless `csc ingest --class-order` says else.
A model that was extended with more data (`csc extend`) has a scenario with `+n` for each time: the n classes of that
data set came last.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from csc.errors import BadScenario

__all__ = ["CLASS_COUNTS", "PAPER_SCENARIOS", "Scenario", "Task"]

CLASS_COUNTS = {"digits": 10, "voc": 20, "coco": 80}
PAPER_SCENARIOS = (
    "coco-b0c10",
    "coco-b40c10",
    "coco-b0c5",
    "coco-b20c4",
    "voc-b0c4",
    "voc-b10c2",
    "voc-b5c3",
    "voc-b4c2",
)

_NAME = re.compile(
    r"(?P<dataset>[a-z0-9][a-z0-9_.-]*)-b(?P<base>\d{1,6})c(?P<increment>\d{1,6})(?P<added>(\+\d{1,6})*)"
)


@dataclass(frozen=True)
class Task:
    """One increment: `new` are the classes labelled in it, `seen` all classes up to and including it."""

    index: int
    total: int
    new: tuple[str, ...]
    seen: tuple[str, ...]

    @property
    def old(self) -> tuple[str, ...]:
        """The classes of earlier tasks."""
        return self.seen[: len(self.seen) - len(self.new)]


@dataclass(frozen=True)
class Scenario:
    """A data set and the way its classes are cut into tasks; `added` has the numbers of those that came later."""

    dataset: str
    base: int
    increment: int
    added: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> "Scenario":
        """Read a name such as `voc-b10c2`.

        >>> Scenario.parse("voc-b10c2")
        Scenario(dataset='voc', base=10, increment=2, added=())
        """
        match = _NAME.fullmatch(name.lower())
        if match is None:
            raise BadScenario(
                f"scenario '{name}': expected <data set>-b<base classes>c<classes per task>, for instance voc-b10c2"
            )
        added = tuple(int(count) for count in match["added"].split("+")[1:])
        scenario = cls(match["dataset"], int(match["base"]), int(match["increment"]), added)
        if 0 in (scenario.increment, *added):
            raise BadScenario(f"scenario '{name}': a task needs at least one new class, so c0 is not possible")
        return scenario

    @property
    def name(self) -> str:
        """The name people type."""
        return f"{self.dataset}-b{self.base}c{self.increment}" + "".join(f"+{count}" for count in self.added)

    @property
    def before(self) -> "Scenario":
        """The scenario of the model that was extended; the same, if none was."""
        return replace(self, added=self.added[:-1])

    def extended(self, classes: int) -> "Scenario":
        """The scenario of a model that learns so many classes of another data set next."""
        return replace(self, added=(*self.added, classes))

    def sizes(self, classes: int) -> tuple[int, ...]:
        """How many classes each task brings, for a data set of so many classes.

        >>> Scenario.parse("voc-b5c3").sizes(20)
        (5, 3, 3, 3, 3, 3)
        >>> Scenario.parse("digits-b0c4").sizes(10)
        (4, 4, 2)
        >>> Scenario.parse("digits-b0c4+3").sizes(13)
        (4, 4, 2, 3)
        """
        if self.added:
            return (*self.before.sizes(classes - self.added[-1]), self.added[-1])
        first = self.base or self.increment
        if first > classes:
            raise BadScenario(
                f"scenario '{self.name}': the base task asks for {first} classes, {self.dataset} has {classes}"
            )
        full, remainder = divmod(classes - first, self.increment)
        return (first, *[self.increment] * full, *([remainder] if remainder else []))

    def tasks(self, classes: Sequence[str]) -> tuple[Task, ...]:
        """Cut the classes, in the given order, into tasks."""
        order = tuple(classes)
        sizes = self.sizes(len(order))
        return tuple(
            Task(index, len(sizes), order[end - size : end], order[:end])
            for index, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True), start=1)
        )

    def task(self, classes: Sequence[str], index: int) -> Task:
        """One task by its number, counted from 1."""
        tasks = self.tasks(classes)
        if not 1 <= index <= len(tasks):
            raise BadScenario(f"scenario '{self.name}' has tasks 1 to {len(tasks)}, there is no task {index}")
        return tasks[index - 1]

    def announcement(self, classes: int) -> str:
        """One line that tells how the classes are cut, and when the last task is smaller than the others.

        >>> Scenario.parse("digits-b0c4").announcement(10)
        'digits-b0c4: 10 classes in 3 tasks (4 + 4 + 2); the last task is smaller, with 2 of 4 classes'
        """
        sizes = self.sizes(classes)
        line = f"{self.name}: {classes} classes in {len(sizes)} tasks ({' + '.join(map(str, sizes))})"
        if len(sizes) > 1 and sizes[-1] < self.increment:
            line += f"; the last task is smaller, with {sizes[-1]} of {self.increment} classes"
        return line
