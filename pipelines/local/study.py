"""Run the pipeline of a study on this machine: a line for each cell that ends, and why it failed if it did.

kfp runs two cells at a time in threads, whose output comes mixed. A step's lines are printed by the thread of its cell,
so the thread tells whose they are. kfp's own functions that change print and logging for everyone are stood in for:
threads that enter and leave them in turn would leave them changed for good.
"""

import contextlib
import io
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kfp.dsl.base_component import BaseComponent
from kfp.local import logging_utils, status
from kfp.local.orchestrator import enhanced_dag_orchestrator

from csc.pipelines.local.runner import COLOUR, ENDED, OUR_ERROR, Runner, heard, log_of, ready
from csc.pipelines.study import Loop
from csc.study.cells import Cell, Result

__all__ = ["Teller", "run_study"]

_TURN = re.compile(r"(?P<loop>.+)-iteration-(?P<index>\d+)")


@dataclass
class _Voice:
    """What one thread is at: the cell, and the end of what its steps have printed."""

    cell: Cell | None = None
    pending: str = ""
    error: str = ""
    tail: list[str] = field(default_factory=list)
    started: float = 0.0

    @property
    def reason(self) -> str:
        """Why a step failed: the line of our own error, or the last line that says anything."""
        said = (line.strip() for line in reversed(self.tail) if line.strip(" -") and not ENDED.match(line))
        return self.error or next(said, "no output")


class Teller(io.TextIOBase):
    """Stands in for standard output while kfp runs the cells: all goes to a log, one line per cell to the person.

    Args:
        out: of the person watching.
        log: file for everything.
        total: number of cells.
        looked_up: finds the result of a cell that has ended.
        verbose: show everything.
    """

    def __init__(
        self, out: TextIO, log: TextIO, total: int, looked_up: Callable[[Cell], Result], *, verbose: bool = False
    ) -> None:
        self.out, self.log, self.total, self.looked_up, self.verbose = out, log, total, looked_up, verbose
        self.failed: dict[str, str] = {}
        self.outside = _Voice()  # steps that belong to no cell
        self.stopped = False
        self.told: set[str] = set()  # keys of the cells that have ended
        self._voices: dict[int, _Voice] = {}
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """This is a place to write to."""
        return True

    def write(self, text: str) -> int:
        """Take output piece by piece, from any thread, and pass it on line by line."""
        voice = self._voice()
        *lines, voice.pending = (voice.pending + text).split("\n")
        for line in lines:
            self._line(voice, COLOUR.sub("", line))
        return len(text)

    def reuse(self, name: str) -> None:
        """Earlier outputs of a step are used again; the log has it already."""

    def record(self, record: logging.LogRecord) -> None:
        """Take what kfp logs; what is no warning explains no failure."""
        take = self._line if record.levelno >= logging.WARNING else self._log
        for line in COLOUR.sub("", record.getMessage()).splitlines():
            take(self._voice(), line)

    def say(self, line: str) -> None:
        """Print one line for the person watching."""
        with self._lock:
            self.out.write(f"{line}\n")
            self.out.flush()

    @contextlib.contextmanager
    def cell(self, cell: Cell) -> Iterator[_Voice]:
        """Hear what this thread prints as the cell's, and tell how the cell ended."""
        voice = self._voices[threading.get_ident()] = _Voice(cell, started=time.monotonic())
        try:
            yield voice
        finally:
            del self._voices[threading.get_ident()]

    def tell(self, voice: _Voice, succeeded: bool) -> None:
        """Say in one line how the cell of a thread ended."""
        result = self.looked_up(voice.cell) if succeeded else None
        with self._lock:
            self.told.add(voice.cell.key)
            title = f"[{len(self.told)}/{self.total}] {voice.cell.name}"
            seconds = time.monotonic() - voice.started
            if result is not None and not result.missing:
                numbers = f"last mAP {result.metrics['last_mAP']:.1f}, average {result.metrics['avg_mAP']:.1f}"
                self.say(f"{title}: {numbers} ({seconds:.0f} s)")
            else:
                self.failed[voice.cell.key] = voice.reason if result is None else result.reason
                self.say(f"{title}: failed after {seconds:.0f} s: {self.failed[voice.cell.key]}")

    def blame(self, cells: Sequence[Cell], otherwise: str) -> None:
        """Say why cells never began, if a step that belongs to no cell failed before them."""
        waiting = [cell.key for cell in cells if cell.key not in self.told]
        if waiting and (self.outside.error or not self.failed):
            reason = self.outside.reason or otherwise
            self.say(f"{len(waiting)} runs could not begin: {reason}")
            self.failed |= dict.fromkeys(waiting, reason)

    def _voice(self) -> _Voice:
        return self._voices.get(threading.get_ident(), self.outside)

    def _line(self, voice: _Voice, line: str) -> None:
        self._log(voice, line)
        if error := OUR_ERROR.match(line):
            voice.error = error["message"]
        voice.tail = [*voice.tail[-30:], line]

    def _log(self, voice: _Voice, line: str) -> None:
        with self._lock:
            whose = f"{voice.cell.name} | " if voice.cell else ""
            self.log.write(f"{whose}{line}\n")
            self.log.flush()
            if self.verbose:
                self.say(f"{whose}{line}")


class _Records(logging.Handler):
    """Hands what kfp logs to the teller, in the thread that logs it."""

    def __init__(self, teller: Teller) -> None:
        super().__init__(logging.INFO)
        self.emit = teller.record


def run_study(
    package: Path,
    arguments: Mapping[str, str],
    workdir: Path,
    turns: Sequence[Loop],
    looked_up: Callable[[Cell], Result],
    *,
    verbose: bool = False,
    runner: Runner = "forked",
) -> dict[str, str]:
    """Execute the compiled pipeline of a study; return why cells failed, by their keys.

    Args:
        package: YAML made by `compile_study`.
        arguments: run-time arguments of the pipeline.
        workdir: folder of outputs, cache and logs.
        turns: the loops that the pipeline was made of.
        looked_up: finds the result of a cell that has ended.
        verbose: show all output.
        runner: see `csc.pipelines.local.runner.run_compiled`.
    """
    cells = [turn.runs for turn in turns]
    log = log_of(package, workdir)
    with ready(package, arguments, workdir, runner) as pipeline, log.open("w", encoding="utf-8") as file:
        teller = Teller(sys.stdout, file, sum(map(len, cells)), looked_up, verbose=verbose)
        teller.say(f"the output of all steps is in {log}")
        try:
            with heard(teller), _told(teller, dict(zip(_loop_names(pipeline), cells, strict=True))), _stoppable(teller):
                pipeline(**arguments)
        except RuntimeError as error:  # of kfp: something failed
            teller.blame([cell for turn in cells for cell in turn], COLOUR.sub("", str(error)))
    return teller.failed


def _loop_names(pipeline: BaseComponent) -> list[str]:
    """The names that kfp gave to the loops, in the order in which they were made."""
    components = pipeline.pipeline_spec.components.values()
    names = [name for part in components for name, task in part.dag.tasks.items() if task.WhichOneof("iterator")]
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


@contextlib.contextmanager
def _told(teller: Teller, cells: Mapping[str, Sequence[Cell]]) -> Iterator[None]:
    """Let kfp's function that runs a task tell when it is a turn of a loop, and which."""
    original = enhanced_dag_orchestrator.execute_task

    def execute_task(task_name: str, **rest: Any) -> tuple[dict[str, Any], status.Status]:
        if teller.stopped:
            return {}, status.Status.FAILURE
        turn = _TURN.fullmatch(task_name)
        if turn is None:
            return original(task_name=task_name, **rest)
        with teller.cell(cells[turn["loop"]][int(turn["index"])]) as voice:
            outputs, ended = original(task_name=task_name, **rest)
            if not teller.stopped:
                teller.tell(voice, ended == status.Status.SUCCESS)
            return outputs, ended

    stand_ins = {
        (enhanced_dag_orchestrator, "execute_task"): execute_task,
        (logging_utils, "indented_print"): lambda *spaces: contextlib.nullcontext(),
        (logging_utils, "local_logger_context"): contextlib.nullcontext,
    }
    before = {place: getattr(*place) for place in stand_ins}
    for place, stand_in in stand_ins.items():
        setattr(*place, stand_in)
    logging.getLogger().addHandler(_Records(teller))  # `heard` restores what was there
    try:
        yield
    finally:
        for place, known in before.items():
            setattr(*place, known)


@contextlib.contextmanager
def _stoppable(teller: Teller) -> Iterator[None]:
    """Let Ctrl-C keep cells from beginning that wait for their turn; kfp would run them all before it ends."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        teller.stopped = True
        signal.default_int_handler(number, frame)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
