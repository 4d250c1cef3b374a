"""Run a compiled pipeline on this machine with kfp.local, and report what happens."""

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from kfp import components, local
from kfp.dsl.base_component import BaseComponent

from csc.errors import CscError
from csc.pipelines.local.containers import steps_in_containers
from csc.pipelines.local.forked import forked_steps
from csc.tracking.server import tracking_uri

__all__ = ["LocalRun", "RunReporter", "StepCrashed", "StepRefused", "run_compiled", "step_titles"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_KFP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} - (?P<level>[A-Z]+) - (?P<message>.*)")
_STARTED = re.compile(r"Executing task '(?P<name>[^']+)'")
_ENDED = re.compile(r"Task '(?P<name>[^']+)' finished with status (?P<status>\w+)")
_REUSED = re.compile(r"Task '?(?P<name>[^' ]+)'? cache hit")
_OUR_ERROR = re.compile(r"\s*csc\.errors\.\w+: (?P<message>.*)")
_WORTH_SHOWING = re.compile(r"\s*(task \d|data: |retry: )")  # how our steps begin their lines; the rest is in the log
_SILENCE = 60.0  # seconds after which a step that says nothing is reported; doubled each time


class StepRefused(CscError):
    """A step that refused its input; the message is the step's own."""


class StepCrashed(Exception):
    """A step that ended in an unforeseen error; the message is the end of its output."""


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


class RunReporter(io.TextIOBase):
    """Stands in for standard output while kfp runs: everything goes to a log, what matters to the person watching.

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
        self._seen: set[str] = set()
        self._pending = ""
        self._started = self._shown = time.monotonic()
        self._patience = _SILENCE

    def writable(self) -> bool:
        """This is a place to write to."""
        return True

    def write(self, text: str) -> int:
        """Take output piece by piece and pass it on line by line."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._line(_COLOUR.sub("", line))
        return len(text)

    def reuse(self, name: str) -> None:
        """Report that a step's earlier outputs are used again.

        Args:
            name: of the step within its task. Tasks come one after the other, so it is the first one not seen yet.
        """
        named = (title for title in self.titles.values() if title.rpartition(" · ")[2] == name)
        title = next((title for title in named if title not in self._seen), name)
        self._seen.add(title)
        self.reused.append(title)
        self.log.write(f"{title} reused\n")
        self.say(f"{title:<24} reused")

    def say(self, line: str) -> None:
        """Print one line for the person watching."""
        self._shown, self._patience = time.monotonic(), _SILENCE
        self._print(line)

    def break_silence(self, now: float) -> None:
        """Say what a step is at if nothing was shown for long: it may wait for a server, or compute."""
        if self.current and now - self._shown > self._patience:
            self._patience *= 2
            last = next((line.strip() for line in reversed(self.tail) if line.strip()), "no output yet")
            self._print(f"  running for {now - self._started:.0f} s; its last line: {last}")

    @property
    def reason(self) -> str:
        """The last line of the present step that says anything."""
        return next((line.strip() for line in reversed(self.tail) if line.strip(" -")), "no output")

    def _print(self, line: str) -> None:
        self.out.write(f"{line}\n")  # kfp replaces print
        self.out.flush()

    def _line(self, line: str) -> None:
        self.log.write(line + "\n")
        self.log.flush()
        if self.verbose:
            self.say(line)
        if message := _KFP.match(line):
            self._message(message["message"])
            return
        if error := _OUR_ERROR.match(line):
            self.error = error["message"]
        self.tail = [*self.tail[-30:], line]
        if not self.verbose and _WORTH_SHOWING.match(line):
            self.say("  " + line.strip())

    def _message(self, message: str) -> None:
        if started := _STARTED.search(message):
            self.current = self.titles.get(started["name"], started["name"])
            self._seen.add(self.current)
            self._started = time.monotonic()
            self.tail = []
            self.say(self.current)
        elif ended := _ENDED.search(message):
            seconds = time.monotonic() - self._started
            self.seconds[self.current] = seconds
            if ended["status"] == "SUCCESS":
                self.say(f"  done in {seconds:.1f} s")


class _CacheHits(logging.Handler):
    """Reports reused steps: kfp logs them, but shows them to nobody."""

    def __init__(self, reporter: RunReporter) -> None:
        super().__init__(logging.INFO)
        self.reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        if hit := _REUSED.search(_COLOUR.sub("", record.getMessage())):
            self.reporter.reuse(hit["name"])


@contextlib.contextmanager
def capture_output(reporter: RunReporter) -> Iterator[None]:
    """Send kfp's output and its cache messages to a reporter."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers, root.level = [_CacheHits(reporter)], logging.INFO
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            reporter.break_silence(time.monotonic())

    threading.Thread(target=watch, daemon=True).start()
    try:
        with contextlib.redirect_stdout(reporter), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # settings that only a cluster can honour
            yield
    finally:
        ended.set()
        root.handlers, root.level = handlers, level


@dataclass(frozen=True)
class LocalRun:
    """A finished run: its results, what was reused, and the seconds each executed step took."""

    table: str
    page: Path
    reused: tuple[str, ...]
    seconds: dict[str, float]


def _cache_of(workdir: Path, name: str, tracking: str) -> Path:
    """The folder that remembers the finished steps of a run.

    It belongs to one tracking server, and is worth nothing without its database. Runs do not share it: the few steps
    that they have in common take a second, and a run that found the output of another run instead of its own would
    repeat all later steps.
    """
    cache = workdir / "cache" / hashlib.sha256(tracking.encode()).hexdigest()[:12] / name
    if tracking.startswith("sqlite:///") and not Path(tracking.removeprefix("sqlite:///")).is_file():
        shutil.rmtree(cache, ignore_errors=True)
    return cache


def run_compiled(
    package: Path,
    arguments: Mapping[str, str],
    workdir: Path,
    *,
    verbose: bool = False,
    runner: Literal["forked", "subprocess", "docker"] = "forked",
) -> LocalRun:
    """Execute a compiled pipeline file; finished steps of earlier tries are reused.

    Args:
        package: YAML made by `compile_pipeline`, named after the run; outputs, cache and logs have the same name.
        arguments: run-time arguments of the pipeline.
        workdir: folder of outputs, cache and logs.
        verbose: show all output, not only what matters.
        runner: whether a step is a fork of a process that has imported everything, a fresh process in this
            environment, or one in a container of its image.
    """
    log = workdir / "logs" / f"{package.stem}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    with load_pipeline(package, arguments, workdir, runner) as pipeline:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            reporter = RunReporter(sys.stdout, file, step_titles(pipeline.pipeline_spec), verbose=verbose)
            try:
                with capture_output(reporter):
                    outputs = pipeline(**arguments).outputs
            except RuntimeError:  # of kfp: a step failed
                if reporter.error is not None:
                    raise StepRefused(reporter.error) from None
                shown = "\n".join(line for line in reporter.tail if line.strip(" -"))
                said = f"csc: {reporter.current}: {reporter.reason}\nthe whole log is {log}"
                raise StepCrashed(f"{shown}\n{said}") from None
    return LocalRun(outputs["table"], Path(outputs["page"].path), tuple(reporter.reused), reporter.seconds)


@contextlib.contextmanager
def load_pipeline(
    package: Path, arguments: Mapping[str, str], workdir: Path, runner: Literal["forked", "subprocess", "docker"]
) -> Iterator[BaseComponent]:
    """Set kfp up to run on this machine, and give the compiled pipeline to call; see `run_compiled`."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # the steps inherit it, and their lines come as they are printed
    started: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "forked": forked_steps,
        "docker": lambda: steps_in_containers(package, arguments, workdir),
        "subprocess": contextlib.nullcontext,
    }
    with started[runner]():
        local.init(
            local.SubprocessRunner(use_venv=False),
            pipeline_root=str(workdir / "pipeline" / package.stem),
            enable_caching=True,
            cache_root=str(_cache_of(workdir, package.stem, tracking_uri())),
        )
        yield components.load_component_from_file(str(package))
