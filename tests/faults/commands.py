"""A command of `csc` that something happens to: start it, wait for a moment, send a signal, see that all of it ends.

A moment is seen, not guessed: a line that the command prints, or a file that appears in its work folder. Only after
that does the seed of a try decide how much later the signal is sent.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.faults.starter import Forked
from tests.integration.conftest import command, environment

SCENARIO = "digits-b0c5"
SMALL = ("train.epochs=3", "train.batch_size=16", "input.size=32", "backbone.name=test_byobnet", "cigcn.width=16")
LONGEST = 600.0  # seconds that a command may take on a busy machine
TITLE = re.compile(r"(?:task \d+ · [a-z-]+|ingest|embed|report)(?:\s+reused)?")


class Lost(Exception):
    """A try that did not end as if nothing had happened; the message says in what."""


@dataclass(frozen=True)
class Moment:
    """When something shall happen: a line is printed or a file appears, and up to `within` seconds have passed."""

    line: str = ""
    file: str = ""
    within: float = 0.0

    def seen(self, lines: Sequence[str], work: Path) -> bool:
        """Whether the line or the file is there."""
        if self.file:
            return next(work.glob(self.file), None) is not None
        return any(re.search(self.line, line) for line in lines)


@dataclass
class Workspace:
    """The folders of a try, and the command that is repeated in it until it ends well."""

    folder: Path
    words: tuple[object, ...]
    settings: tuple[str, ...] = SMALL
    variables: Mapping[str, str] = field(default_factory=dict)
    forked: bool = True  # whether the command is a fork that has all its libraries, or a new Python process

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self) -> "Running":
        """Start the command."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        variables = {**environment(), "TMPDIR": str(self.temporary), **self.variables}
        words = command(*self.words, settings=self.settings)
        return Running(Forked(words, variables) if self.forked else _fresh(words, variables), self.work)

    def finish(self, tries: int = 1, failed: int = 2) -> str:
        """Run the command until it succeeds, a few times at most; each failure before has a code and no traceback."""
        for left in reversed(range(tries)):
            with self.start() as running:
                code = running.wait()
            if code == 0:
                return running.output
            if code != failed or "Traceback" in running.output or left == 0:
                raise Lost(f"exit code {code}: {running.end_of_output}")
        raise AssertionError

    def disturb(self, moment: Moment, rng: Random, act: "Callable[[Running], None]") -> "Running":
        """Run the command and do something to it at a moment; return when it has ended, whatever the outcome."""
        with self.start() as running:
            running.came = running.wait_for(moment)
            if running.came:
                time.sleep(rng.uniform(0, moment.within))
                running.step = running.at_work
                if not moment.file:  # which may be there for milliseconds
                    running.look_around()
                if running.process.poll() is None:
                    act(running)
            running.wait()
        return running


class Running:
    """A command at work, and everything that it has started."""

    def __init__(self, process: "subprocess.Popen[str] | Forked", work: Path) -> None:
        self.process, self.work = process, work
        self.lines: list[str] = []
        self.step = ""  # at the moment of the act
        self.came = False  # whether the moment did
        self.sent = False  # whether a signal was
        self.family: list[int] = []  # all processes that the command has started, as last seen, youngest first
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.look_around()
            for pid in [*self.family, self.process.pid]:
                _send(pid, signal.SIGKILL)
            self.process.wait()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def end_of_output(self) -> str:
        return " / ".join(self.lines[-4:])

    @property
    def at_work(self) -> str:
        """The title of the step that is at work; empty between two."""
        current = ""
        for line in list(self.lines):
            if TITLE.fullmatch(line.strip()):
                current = "" if line.endswith("reused") else line.strip()
            elif line.startswith("  done in"):
                current = ""
        return current

    def wait_for(self, moment: Moment) -> bool:
        """Whether a moment comes before the command ends."""
        until, looked = time.monotonic() + LONGEST, 0.0
        while time.monotonic() < until:
            if time.monotonic() - looked > 0.3:
                self.look_around()
                looked = time.monotonic()
            if moment.seen(list(self.lines), self.work):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.0002 if moment.file else 0.005)
        raise Lost(f"never came to {moment}: {self.end_of_output}")

    def wait(self) -> int:
        """The exit code, once the command and all that it has started are gone."""
        try:
            code = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            raise Lost(f"hangs: {self.end_of_output}") from None
        until = time.monotonic() + 30
        while any(map(_is_alive, self.family)):
            if time.monotonic() > until:
                raise Lost(f"a process outlived the command by 30 s, after: {self.end_of_output}")
            time.sleep(0.02)
        self._reader.join(5)
        return code

    def look_around(self) -> None:
        """Find all processes that the command has started."""
        children: dict[int, list[int]] = {}
        for pid, parent in _parents().items():
            children.setdefault(parent, []).append(pid)
        found, generation = [], [self.process.pid]
        if isinstance(self.process, Forked):  # its steps are forks of a server that was there before
            found.append(children.pop(self.process.server, []))
        while generation := [child for pid in generation for child in children.get(pid, ())]:
            found.append(generation)
        self.family = [pid for generation in reversed(found) for pid in generation] or self.family

    def kill(self, target: str) -> None:
        """SIGKILL to `everything` as when a node dies, to the `command` alone, or to its `step` as for its memory."""
        if target != "command":
            victims = [pid for pid in self.family if target == "everything" or _leads_a_session(pid)]
            for pid in victims:
                _send(pid, signal.SIGKILL)
        if target != "step" or not victims:
            _send(self.process.pid, signal.SIGKILL)
        self.sent = True

    def terminate(self) -> None:
        """SIGTERM to the command, as a shell or a service manager sends it."""
        _send(self.process.pid, signal.SIGTERM)
        self.sent = True


def _fresh(words: list[str], variables: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start a command as a shell does."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(variables),
        start_new_session=True,
    )


def _parents() -> dict[int, int]:
    """The parent of every process of this machine."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            found[int(entry.name)] = int(fields[1])
    return found


def _leads_a_session(pid: int) -> bool:
    """Whether a process is a step: each has a session of its own."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def removed_at_the_end(folder: Path) -> Iterator[Path]:
    """Make a folder for the block; one of a try that was lost stays, to be looked at."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
