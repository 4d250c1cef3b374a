"""Run the cells of a study on this machine: each is a `csc run` in a process of its own, several at a time."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from csc.config.tree import flatten, setting_text
from csc.data.cores import cores
from csc.errors import CscError
from csc.study.cells import Cell, Result
from csc.study.live import RunningCell, live_view

__all__ = ["command_of", "run_cells"]

_ERROR = "csc: "  # how the command begins the line that says what was wrong


def command_of(cell: Cell, workdir: str, options: Sequence[str] = ()) -> list[str]:
    """The command line of a cell's run; `options` are further words, the same for all cells."""
    settings = json.loads(cell.settings)
    method, seed = settings.pop("method"), settings.pop("seed")
    words = ["run", cell.scenario.name, "--method", method, "--seed", str(seed), "--workdir", workdir]
    words += ["--data", cell.source.uri] if cell.source else []
    for key, value in flatten(settings):
        words += ["--set", f"{key}={setting_text(value)}"]
    return [sys.executable, "-m", "csc", *words, *options]


def run_cells(
    cells: Sequence[Cell],
    command: Callable[[Cell], list[str]],
    look_up: Callable[[Cell], Result],
    *,
    parallel: int = 1,
    verbose: bool = False,
) -> dict[str, str]:
    """Run cells to their ends, whatever becomes of each; return why some failed, by their keys.

    A line is printed for each cell that ends, and a terminal shows those at work. The first of the cells that share
    feature maps makes them; the others wait until it has ended. An interrupt ends all runs before it is raised again.
    `look_up` finds the result of a cell whose command has succeeded.
    """
    waiting, running, failed = list(cells), list[_Run](), dict[str, str]()
    ended: queue.Queue[_Run] = queue.Queue()
    environment = _environment(min(parallel, len(cells)))
    have_maps, finished = set[object](), list[Result]()
    try:
        with live_view(lambda: [run.at_work for run in running], finished) as print_line:
            while waiting or running:
                for cell in _startable(waiting, [run.cell for run in running], have_maps, parallel - len(running)):
                    waiting.remove(cell)
                    running.append(_Run(cell, command(cell), environment, ended, verbose))
                run = ended.get()
                running.remove(run)
                have_maps.add(run.cell.maps)
                result, reason = run.outcome(look_up)
                title = f"[{len(cells) - len(waiting) - len(running)}/{len(cells)}] {run.cell.name}"
                if result is not None:
                    finished.append(result)
                    numbers = f"last mAP {result.metrics['last_mAP']:.1f}, average {result.metrics['avg_mAP']:.1f}"
                    print_line(f"{title}: {numbers} ({run.seconds:.0f} s)")
                else:
                    failed[run.cell.key] = reason
                    print_line(f"{title}: failed after {run.seconds:.0f} s: {reason}")
    finally:
        for run in running:
            run.process.terminate()  # `csc run` takes it as an interrupt
        for run in running:
            run.process.wait()
    return failed


def _environment(parallel: int) -> dict[str, str]:
    """The variables of the commands: where several run at the same time, each gets its share of the cores."""
    if parallel <= 1 or os.environ.get("OMP_NUM_THREADS"):
        return dict(os.environ)
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // parallel))}


def _startable(waiting: Sequence[Cell], running: Sequence[Cell], have_maps: set[object], free: int) -> list[Cell]:
    """The next cells to start, at most `free`: not those whose maps another one is about to make."""
    making, chosen = {cell.maps for cell in running} - have_maps, list[Cell]()
    for cell in waiting:
        if len(chosen) < free and (not cell.maps or cell.maps not in making):
            chosen.append(cell)
            making |= {cell.maps} - have_maps
    return chosen


class _Run:
    """The process of a cell, and the line of its output that says why it failed; put into a queue when it has ended."""

    def __init__(
        self, cell: Cell, command: Sequence[str], environment: dict[str, str], ended: "queue.Queue[_Run]", verbose: bool
    ) -> None:
        self.cell, self.verbose = cell, verbose
        self.started, self.seconds = time.monotonic(), 0.0
        self.error = self.last_line = ""
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._follow, args=(ended,), daemon=True).start()

    @property
    def at_work(self) -> RunningCell:
        """How far it is."""
        return RunningCell(self.cell.name, time.monotonic() - self.started, self.last_line)

    def _follow(self, ended: "queue.Queue[_Run]") -> None:
        """Read the output to its end; a process whose output is not read blocks when the buffer is full."""
        for line in self.process.stdout or ():
            if self.verbose:
                print(f"{self.cell.name} | {line}", end="", flush=True)
            if line.startswith(_ERROR):
                self.error = line.removeprefix(_ERROR).strip()
            self.last_line = line.strip() or self.last_line
        self.process.wait()
        self.seconds = time.monotonic() - self.started
        ended.put(self)

    def outcome(self, look_up: Callable[[Cell], Result]) -> tuple[Result | None, str]:
        """The result of a run that has ended; none, and the reason, if it has failed."""
        code = self.process.returncode
        if code < 0:
            return None, f"ended by {signal.Signals(-code).name}"
        if code > 0:
            return None, self.error or self.last_line or f"exit code {code}, no output"
        try:
            result = look_up(self.cell)
        except CscError as error:
            return None, str(error)
        return (None, result.reason) if result.missing else (result, "")
