"""A live display of a run, for a terminal: finished tasks, the step at work with its bar, and how long it will take."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from csc.data.progress import ProgressTick, duration
from csc.pipelines.local.display import WORTH_SHOWING, Display

__all__ = ["Forecast", "LiveDisplay"]

_TASK = re.compile(r"task (\d+) · (.+)")
_RESULT = re.compile(r"task \d+/\d+: (mAP .*?)( on .*)?$")
_EPOCH = re.compile(r"task \d+/\d+ · epoch \d+/\d+ · (.*) · \d+ images/s")
_LAST_STEP = "register"  # of a task


def _task_and_step(title: str) -> tuple[int, str]:
    """The number of a step's task, 0 for a step of none, and its name.

    >>> _task_and_step("task 2 · train"), _task_and_step("ingest")
    ((2, 'train'), (0, 'ingest'))
    """
    found = _TASK.fullmatch(title)
    return (int(found[1]), found[2]) if found else (0, title)


class Forecast:
    """How long the rest of a scenario will take, judged by the steps so far.

    A step is expected to take as long for each new class of its task as the same step of other tasks did; `sizes` are
    the numbers of new classes of the tasks.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = sizes
        self.coming: set[str] = set()
        self._per_class: dict[str, list[float]] = {}

    def ended(self, title: str, seconds: float) -> None:
        """A step took so long."""
        task, step = _task_and_step(title)
        self.coming.discard(title)
        self._per_class.setdefault(step, []).append(seconds / self.sizes.get(task, 1))

    def left(self, title: str, elapsed: float, left: float | None) -> tuple[float, float] | None:
        """Seconds until the task and the scenario are done; None as long as nothing can be said.

        The present step of this title began `elapsed` seconds ago and, if it knows, is done after those `left`.
        """
        task, step = _task_and_step(title)
        size = self.sizes.get(task, 1)
        if left is None:
            if step not in self._per_class:
                return None
            left = max(self._expected(step, size) - elapsed, 0.0)
        present = (elapsed + left) / size  # a first estimate for the same step of later tasks
        of_task = of_scenario = left
        for other in self.coming - {title}:
            number, name = _task_and_step(other)
            seconds = self._expected(name, self.sizes.get(number, 1), present if name == step else 0.0)
            of_scenario += seconds
            of_task += seconds if number == task else 0.0
        return of_task, of_scenario

    def _expected(self, step: str, size: int, default: float = 0.0) -> float:
        known = self._per_class.get(step)
        return size * (sum(known) / len(known) if known else default)


class LiveDisplay(Display):
    """Lines for what is finished, and below them what is going on, drawn again several times a second."""

    reports = True

    def __init__(self, out: TextIO, sizes: Mapping[int, int], console: Console | None = None) -> None:
        self.console = console or Console(file=out, highlight=False)
        self.forecast = Forecast(sizes)
        self.spinner = Spinner("dots", style="cyan")
        self.title, self.losses, self.result, self.said = "", "", "", ""
        self.tick: ProgressTick | None = None
        self._begun = self._task_begun = time.monotonic()
        self._reused: dict[int, int] = {}
        self.live = Live(
            console=self.console,
            get_renderable=self._draw,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.title = ""
        self.live.stop()

    def say(self, line: str) -> None:
        """Print it above the drawing."""
        self._print(Text(line))

    def expect(self, titles: Iterable[str]) -> None:
        """Note what the forecast is about."""
        self.forecast.coming = set(titles)

    def begin(self, title: str) -> None:
        """Draw another step."""
        task, _ = _task_and_step(title)
        if task != _task_and_step(self.title)[0]:
            self._task_begun = time.monotonic()
        self.title, self.tick, self.losses, self.said = title, None, "", ""
        self._begun = time.monotonic()

    def line(self, line: str) -> None:
        """Keep what the next drawing or the line of the task shows."""
        if result := _RESULT.match(line):
            self.result = result[1]
        elif epoch := _EPOCH.match(line):
            self.losses = epoch[1]
        elif line.startswith("note: "):
            self.console.print(Text(f"  {line}"))  # in as many lines as it takes
        elif line.startswith("retry: ") or " · asked to stop · " in line:
            self._print(Text(f"  {line}", "yellow"))
        elif WORTH_SHOWING.match(line):
            self.said = line

    def progress(self, tick: ProgressTick) -> None:
        """Draw the bar as far."""
        self.tick = tick

    def end(self, title: str, seconds: float) -> None:
        """Print a line if a task has ended with it."""
        self.forecast.ended(title, seconds)
        task, step = _task_and_step(title)
        if not task:
            self._done(title, self.said.removeprefix("data: "), seconds)
        elif step == _LAST_STEP:
            facts = [self.result] if self.result else []
            reused = self._reused.get(task, 0)
            facts += [f"{reused} step{'s' if reused > 1 else ''} reused"] if reused else []
            self._done(f"task {task}", " · ".join(facts), time.monotonic() - self._task_begun)
            self.result = ""

    def reuse(self, title: str) -> None:
        """Print a line if it was the last of its task."""
        self.forecast.coming.discard(title)
        task, step = _task_and_step(title)
        self._reused[task] = self._reused.get(task, 0) + 1
        if not task or step == _LAST_STEP:
            self._print(Text.assemble(("✓ ", "green"), f"{f'task {task}' if task else title:<9}", ("reused", "dim")))

    def _done(self, title: str, text: str, seconds: float) -> None:
        took = f"{' ' if text else ''}({duration(seconds)})"
        self._print(Text.assemble(("✓ ", "green"), f"{title:<9}", text, (took, "dim")))

    def _print(self, line: Text) -> None:
        self.console.print(line, overflow="ellipsis", no_wrap=True)

    def _draw(self) -> RenderableType:
        if not self.title:
            return Text("")
        elapsed, tick = time.monotonic() - self._begun, self.tick
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self.spinner, Text(self.title, "bold")]
        if tick is not None:
            bar = ProgressBar(total=max(tick.total, 1), completed=tick.done, width=24)
            cells += [Text(tick.title), bar, f"{tick.speed:,.0f} {tick.unit}/s", Text(self.losses, "dim")]
        else:
            cells += [Text(duration(elapsed), "dim")]
        row.add_row(*cells)
        expected = self.forecast.left(self.title, elapsed, tick.left if tick is not None else None)
        if expected is None:
            return row
        task, _ = _task_and_step(self.title)
        of_task = f"task {task}: {duration(expected[0])} left · " if task else ""
        return Group(row, Text(f"  {of_task}scenario: about {duration(expected[1])} left", "dim"))
