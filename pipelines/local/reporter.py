"""What happens in a run on this machine: everything goes to a log, what matters to the person watching."""

import re
import time
from collections.abc import Mapping
from typing import Any, TextIO

from csc.data.progress import ProgressTick
from csc.pipelines.local.display import Display
from csc.report.text import printable

__all__ = ["RunReporter", "step_titles"]

_END_OF_INPUTS = "}"  # of the JSON in which kfp tells a step's inputs before the step begins
_OUR_ERROR = re.compile(r"csc\.(?:\w+\.)+[A-Z]\w*: (?P<message>.*)")  # how a traceback ends that we raised


def step_titles(spec: Any) -> dict[str, str]:
    """The title of every step of a compiled pipeline by the name that kfp.local gives it, in the order of the tasks.

    kfp.local names a step after its component: `train-3` may be that of any task. Whose it is, the `PipelineSpec` says:
    each task is a sub-pipeline with its number as an argument.
    """
    titles: dict[str, tuple[int, str]] = {}
    for name, task in spec.root.dag.tasks.items():
        component = spec.components[task.component_ref.name]
        if component.HasField("dag"):
            number = int(task.inputs.parameters["task"].runtime_value.constant.number_value)
            for step, inner in component.dag.tasks.items():
                titles[inner.component_ref.name] = (number, f"task {number} · {step}")
        else:
            titles[task.component_ref.name] = (0, name)
    ordered = sorted(titles.items(), key=lambda item: item[1])
    return {component.removeprefix("comp-"): title for component, (_, title) in ordered}


class RunReporter:
    """Is told of every step, and tells a log and a display; `titles` are those of `step_titles`."""

    def __init__(self, display: Display, log: TextIO, titles: Mapping[str, str]) -> None:
        self.display, self.log, self.titles = display, log, titles
        self.reused: list[str] = []
        self.seconds: dict[str, float] = {}
        self.error: str | None = None
        self.current = ""
        self.tail: list[str] = []
        self._inputs_printed = False
        self._started = time.monotonic()
        display.expect(titles.values())

    def begin(self, name: str) -> None:
        """A step begins."""
        self.current, self.tail, self._inputs_printed = self.titles.get(name, name), [], False
        self._started = time.monotonic()
        self.display.begin(self.current)

    def line(self, line: str) -> None:
        """The step has printed a line."""
        if tick := ProgressTick.parse(line):
            self.display.progress(tick)
            return
        self.log.write(f"{line}\n")
        self.log.flush()
        self.tail = [*self.tail[-30:], line]
        if line == _END_OF_INPUTS and not self._inputs_printed:
            self.tail, self._inputs_printed = [], True
        if error := _OUR_ERROR.match(line.strip()):
            self.error = error["message"]
        self.display.line(printable(line.expandtabs().strip()))

    def end(self, code: int) -> None:
        """The step has ended."""
        self.seconds[self.current] = time.monotonic() - self._started
        if code == 0:
            self.display.end(self.current, self.seconds[self.current])

    def reuse(self, name: str) -> None:
        """A step's earlier outputs are used again."""
        title = self.titles.get(name, name)
        self.reused.append(title)
        self.log.write(f"{title} reused\n")
        self.display.reuse(title)

    def repair(self, name: str, output: str) -> None:
        """An output of a step is damaged, so the step runs again."""
        line = f"{self.titles.get(name, name)}: {output} has changed since it was written; the step runs again"
        self.log.write(f"{line}\n")
        self.display.say(line)
