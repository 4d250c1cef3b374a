"""Run a compiled pipeline on this machine with kfp.local, and tell a person what happens."""

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from kfp import components, local
from kfp.dsl.base_component import BaseComponent

from csc.errors import CscError
from csc.pipelines.local.containers import docker_runner
from csc.pipelines.local.forked import forked_steps
from csc.tracking.runs import tracking_uri

__all__ = [
    "COLOUR",
    "ENDED",
    "OUR_ERROR",
    "LocalRun",
    "Runner",
    "StepCrashed",
    "StepRefused",
    "heard",
    "log_of",
    "ready",
    "run_compiled",
]

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_KFP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} - (?P<level>[A-Z]+) - (?P<message>.*)")
_STARTED = re.compile(r"Executing task '(?P<name>[^']+)'")
ENDED = re.compile(r"Task '(?P<name>[^']+)' finished with status (?P<status>\w+)")
_REUSED = re.compile(r"Task '?(?P<name>[^' ]+)'? cache hit")
OUR_ERROR = re.compile(r"\s*csc\.errors\.\w+: (?P<message>.*)")
_WORTH_SHOWING = re.compile(r"\s*(task \d|data: |retry: )")  # how our steps begin their lines; the rest is in the log
Runner = Literal["forked", "subprocess", "docker"]
_PER_TASK = ("split-labels", "build-dataset", "train", "evaluate", "register")


class StepRefused(CscError):
    """A step that refused its input; the message is the step's own."""


class StepCrashed(Exception):
    """A step that ended in an error nobody foresaw; the message is the end of its output."""


class Narrator(io.TextIOBase):
    """Stands in for standard output while kfp runs: everything goes to a log, what matters to the person watching.

    It counts how often each step was seen, so it can tell the task a step belongs to.
    """

    def __init__(self, out: TextIO, log: TextIO, *, verbose: bool, first_task: int = 1) -> None:
        self.out, self.log, self.verbose = out, log, verbose
        self.seen: Counter[str] = Counter(dict.fromkeys(_PER_TASK, first_task - 1))
        self.reused: list[str] = []
        self.seconds: dict[str, float] = {}
        self.error: str | None = None
        self.current = ""
        self.tail: list[str] = []
        self._pending = ""
        self._started = time.monotonic()

    def writable(self) -> bool:
        """This is a place to write to."""
        return True

    def write(self, text: str) -> int:
        """Take output piece by piece and pass it on line by line."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._line(COLOUR.sub("", line))
        return len(text)

    def reuse(self, name: str) -> None:
        """Note that a step's earlier outputs are used again."""
        title = self._title(name)
        self.reused.append(title)
        self.say(f"{title:<24} reused")

    def say(self, line: str) -> None:
        """Print one line for the person watching."""
        print(line, file=self.out, flush=True)

    def _line(self, line: str) -> None:
        self.log.write(line + "\n")
        self.log.flush()
        if self.verbose:
            self.say(line)
        if message := _KFP.match(line):
            self._message(message["message"])
            return
        if error := OUR_ERROR.match(line):
            self.error = error["message"]
        self.tail = [*self.tail[-30:], line]
        if not self.verbose and _WORTH_SHOWING.match(line):
            self.say("  " + line.strip())

    def _message(self, message: str) -> None:
        if started := _STARTED.search(message):
            self.current = self._title(started["name"])
            self._started = time.monotonic()
            self.tail = []
            self.say(self.current)
        elif ended := ENDED.search(message):
            seconds = time.monotonic() - self._started
            self.seconds[self.current] = seconds
            if ended["status"] == "SUCCESS":
                self.say(f"  done in {seconds:.1f} s")

    def _title(self, name: str) -> str:
        """`train` of the third task is "task 3 · train"."""
        step = re.sub(r"-\d+$", "", name)
        self.seen[step] += 1
        return f"task {self.seen[step]} · {step}" if step in _PER_TASK else step


class _CacheHits(logging.Handler):
    """Hears of reused steps: kfp logs them, but shows them to nobody."""

    def __init__(self, narrator: Narrator) -> None:
        super().__init__(logging.INFO)
        self.narrator = narrator

    def emit(self, record: logging.LogRecord) -> None:
        if hit := _REUSED.search(COLOUR.sub("", record.getMessage())):
            self.narrator.reuse(hit["name"])


@contextlib.contextmanager
def heard(narrator: Narrator) -> Iterator[None]:
    """Route kfp's output and its cache messages through the narrator."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers, root.level = [_CacheHits(narrator)], logging.INFO
    try:
        with contextlib.redirect_stdout(narrator), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # settings that only a cluster can honour
            yield
    finally:
        root.handlers, root.level = handlers, level


@dataclass(frozen=True)
class LocalRun:
    """A finished run: its results, what was reused, and the seconds each executed step took."""

    table: str
    page: Path
    reused: tuple[str, ...]
    seconds: dict[str, float]


def _cache_of(workdir: Path, tracking: str) -> Path:
    """The memory of finished steps; it belongs to one tracking server, and is worth nothing without its database."""
    cache = workdir / "cache" / hashlib.sha256(tracking.encode()).hexdigest()[:12]
    if tracking.startswith("sqlite:///") and not Path(tracking.removeprefix("sqlite:///")).is_file():
        shutil.rmtree(cache, ignore_errors=True)
    return cache


def run_compiled(
    package: Path,
    arguments: Mapping[str, str],
    workdir: Path,
    *,
    verbose: bool = False,
    first_task: int = 1,
    runner: Runner = "forked",
) -> LocalRun:
    """Execute a compiled pipeline file; finished steps of earlier tries are reused.

    Args:
        package: YAML made by `compile_pipeline`.
        arguments: run-time arguments of the pipeline.
        workdir: folder of outputs, cache and logs.
        verbose: show all output, not only what matters.
        first_task: number of the pipeline's first task.
        runner: whether a step is a fork of a process that has imported everything, a fresh process in this
            environment, or one in a container of its image.
    """
    with ready(package, arguments, workdir, runner) as pipeline:
        return _execute(pipeline, package, arguments, workdir, verbose, first_task)


@contextlib.contextmanager
def ready(package: Path, arguments: Mapping[str, str], workdir: Path, runner: Runner) -> Iterator[BaseComponent]:
    """Set kfp up to run on this machine, and give the compiled pipeline to call; see `run_compiled`."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # the steps inherit it, and their lines come as they are printed
    with contextlib.ExitStack() as stack:
        if runner == "docker":
            how = stack.enter_context(docker_runner(package, arguments, workdir))
        else:
            how = local.SubprocessRunner(use_venv=False)
        if runner == "forked":
            stack.enter_context(forked_steps())
        local.init(
            how,
            pipeline_root=str(workdir / "pipeline"),
            enable_caching=True,
            cache_root=str(_cache_of(workdir, tracking_uri())),
        )
        yield components.load_component_from_file(str(package))


def log_of(package: Path, workdir: Path) -> Path:
    """The file for all output of a run that begins now."""
    log = workdir / "logs" / f"{package.stem}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def _execute(
    pipeline: BaseComponent,
    package: Path,
    arguments: Mapping[str, str],
    workdir: Path,
    verbose: bool,
    first_task: int,
) -> LocalRun:
    """Let kfp run the pipeline as it was told to, and listen."""
    log = log_of(package, workdir)
    with log.open("w", encoding="utf-8") as file:
        narrator = Narrator(sys.stdout, file, verbose=verbose, first_task=first_task)
        try:
            with heard(narrator):
                outputs = pipeline(**arguments).outputs
        except RuntimeError as error:
            if narrator.error is not None:
                raise StepRefused(narrator.error) from None
            shown = "\n".join(line for line in narrator.tail if line.strip())
            raise StepCrashed(f"{shown}\n{COLOUR.sub('', str(error))}; the whole log is {log}") from None
    page = Path(outputs["page"].path)
    return LocalRun(outputs["table"], page, tuple(narrator.reused), narrator.seconds)
