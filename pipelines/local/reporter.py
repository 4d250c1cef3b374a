"""What happens in a run on this machine: everything for a log, what matters for the person watching."""

import re
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

__all__ = ["RunReporter", "step_titles"]

_OUR_ERROR = re.compile(r"csc\.errors\.\w+: (?P<message>.*)")
_WORTH_SHOWING = re.compile(r"task \d|data: |retry: ")  # how our steps begin their lines; the rest is in the log
_SILENCE = 60.0  # seconds after which a step that says nothing is reported; doubled each time


def step_titles(spec: Any) -> dict[str, str]:
    """The title of every step of a compiled pipeline by the name that kfp.local gives it, in the order of the tasks.

    kfp.local names a step after its component: `train-3` may be that of any task. Whose it is, the pipeline says: each
    task is a sub-pipeline with its number as an argument.

    Args:
        spec: a `PipelineSpec`.
    """
    titles: dict[str, tuple[int, str]] = {}
    for name, task in spec.root.dag.tasks.items():
        component, number = spec.components[task.component_ref.name], 0
        if not component.HasField("dag"):
            titles[task.component_ref.name] = (number, name)
            continue
        number = int(task.inputs.parameters["task"].runtime_value.constant.number_value)
        for step, inner in component.dag.tasks.items():
            titles[inner.component_ref.name] = (number, f"task {number} · {step}")
    ordered = sorted(titles.items(), key=lambda item: item[1])
    return {component.removeprefix("comp-"): title for component, (_, title) in ordered}


class RunReporter:
    """Is told of every step, and tells a log and a person.

    Args:
        out: for the person.
        log: for everything.
        titles: of the steps, see `step_titles`.
        verbose: show everything.
    """

    def __init__(self, out: TextIO, log: TextIO, titles: Mapping[str, str], *, verbose: bool = False) -> None:
        self.out, self.log, self.titles, self.verbose = out, log, titles, verbose
        self.reused: list[str] = []
        self.seconds: dict[str, float] = {}
        self.error: str | None = None
        self.current = ""
        self.tail: list[str] = []
        self._started = self._shown = time.monotonic()
        self._patience = _SILENCE

    def begin(self, name: str) -> None:
        """A step begins."""
        self.current, self.tail = self.titles.get(name, name), []
        self._started = time.monotonic()
        self._say(self.current)

    def line(self, line: str) -> None:
        """The step has printed a line."""
        self.log.write(f"{line}\n")
        self.log.flush()
        self.tail = [*self.tail[-30:], line]
        if error := _OUR_ERROR.match(line.strip()):
            self.error = error["message"]
        if self.verbose or _WORTH_SHOWING.match(line.strip()):
            self._say(f"  {line.strip()}")

    def end(self, code: int) -> None:
        """The step has ended."""
        seconds = time.monotonic() - self._started
        self.seconds[self.current] = seconds
        if code == 0:
            self._say(f"  done in {seconds:.1f} s")

    def reuse(self, name: str) -> None:
        """A step's earlier outputs are used again."""
        title = self.titles.get(name, name)
        self.reused.append(title)
        self.log.write(f"{title} reused\n")
        self._say(f"{title:<24} reused")

    @property
    def reason(self) -> str:
        """The last line of the present step that says anything."""
        return next((line.strip() for line in reversed(self.tail) if line.strip(" -")), "no output")

    def watch(self, ended: threading.Event) -> None:
        """Say what a step is at if nothing was shown for long: it may wait for a server, or compute."""
        while not ended.wait(1):
            self.break_silence(time.monotonic())

    def break_silence(self, now: float) -> None:
        """Say what the step is at if nothing was shown for long."""
        if self.current and now - self._shown > self._patience:
            self._patience *= 2
            self._print(f"  running for {now - self._started:.0f} s; its last line: {self.reason}")

    def _say(self, line: str) -> None:
        self._shown, self._patience = time.monotonic(), _SILENCE
        self._print(line)

    def _print(self, line: str) -> None:
        self.out.write(f"{line}\n")  # kfp replaces print
        self.out.flush()
