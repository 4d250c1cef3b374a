"""Which tasks of a scenario a pipeline has: all of them, or a window such as `3-5`."""

import re
from dataclasses import dataclass

from csc.errors import BadScenario
from csc.scenario import Scenario

__all__ = ["Window"]

_FORM = re.compile(r"(?P<first>[0-9]{1,6})?(?P<to>-)?(?P<last>[0-9]{1,6})?")


@dataclass(frozen=True)
class Window:
    """The tasks from `first` to `last`, counted from 1, both included, of a scenario that has `total`."""

    first: int
    last: int
    total: int

    @classmethod
    def parse(cls, text: str | None, scenario: Scenario, classes: int) -> "Window":
        """Read what a person types: `2-4`, `3-` (to the end), `-2` (from the first), `3` (only this one).

        >>> Window.parse("3-", Scenario.parse("digits-b0c2"), 10)
        Window(first=3, last=5, total=5)
        >>> Window.parse(None, Scenario.parse("digits-b0c2"), 10)
        Window(first=1, last=5, total=5)
        """
        if scenario.added:
            raise BadScenario(f"scenario '{scenario.name}' is that of an extended model; 'csc extend' makes one")
        total = len(scenario.sizes(classes))
        if text is None:
            return cls(1, total, total)
        match = _FORM.fullmatch(text.replace(" ", ""))
        if match is None or not (match["first"] or match["last"]):
            raise BadScenario(f"--tasks {text}: expected the numbers of tasks, for instance 2-4, 3-, -2 or 3")
        first = int(match["first"] or 1)
        last = int(match["last"] or (total if match["to"] else first))
        if not 1 <= first <= last <= total:
            raise BadScenario(f"--tasks {text}: scenario '{scenario.name}' has tasks 1 to {total}, in this order")
        return cls(first, last, total)

    @property
    def is_complete(self) -> bool:
        """Whether no task is left out."""
        return (self.first, self.last) == (1, self.total)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
