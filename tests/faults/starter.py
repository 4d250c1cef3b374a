"""Commands of `csc`, and scripts, that start at once: forks of a process that has imported what they need.

To start Python and import everything, twice, takes twelve seconds of processor time; a hundred starts, twenty minutes.
Here a process imports it once, forks the fork server that steps are forks of, and forks a command for each line it
reads. From there on the command is what a person starts: a session of its own, its own environment, real steps. The
cells of a study are forks too, in the study's session.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from multiprocessing import forkserver, reduction, util
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.frames import callers


class Forked:
    """A command that was started here, with what we use of `subprocess.Popen`."""

    def __init__(
        self,
        words: list[str],
        variables: Mapping[str, str],
        errors: str = "",
        cwd: str = "",
        terminal: str = "",
        *,
        session: bool = True,
    ) -> None:
        """Start it.

        Args:
            words: `python -m csc …`, or `python SCRIPT.py …`.
            variables: its environment.
            errors: file for its errors, which are in its output otherwise.
            cwd: folder where it runs, if not the present one.
            terminal: device that it is started from and prints to; there is no `stdout` then.
            session: whether it has a session of its own, or that of the process that it was forked from.
        """
        starter, self.server = _starter()
        self._folder = Path(tempfile.mkdtemp(prefix="csc-forked-"))
        if not terminal:
            os.mkfifo(self._folder / "output")
        assert starter.stdin is not None
        assert starter.stdout is not None
        words, folder = words[3:] if words[1] == "-m" else words[1:], str(self._folder)
        request = {"words": words, "variables": dict(variables), "folder": folder, "errors": errors, "cwd": cwd}
        request |= {"terminal": terminal, "session": session}
        starter.stdin.write(f"{json.dumps(request)}\n")
        starter.stdin.flush()
        self.pid = int(starter.stdout.readline())
        if not terminal:
            self.stdout: IO[str] = (self._folder / "output").open(errors="replace")
        self.returncode: int | None = None
        self._reading = threading.Lock()  # several threads may wait for a cell

    def poll(self) -> int | None:
        """The exit code, if the command has ended."""
        with self._reading:
            if self.returncode is None and (self._folder / "code").exists():
                self.returncode = int((self._folder / "code").read_text())
                shutil.rmtree(self._folder)
            return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, once the command has ended."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("csc", timeout)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def finished(
    words: list[str], variables: Mapping[str, str], cwd: str = "", seconds: float = 600.0
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder, "errors")
        started = Forked(words, variables, str(errors), cwd)
        with started.stdout:
            printed = started.stdout.read()
        code = started.wait(seconds)
        return subprocess.CompletedProcess(words, code, printed, errors.read_text(errors="replace"))


@cache
def _starter() -> "tuple[subprocess.Popen[str], int]":
    """The process of this test process that forks, and the fork server of its steps; both end with this process."""
    words = [sys.executable, "-m", "tests.faults.starter"]
    starter = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    return starter, int(starter.stdout.readline())


def main() -> None:
    """Fork a command for each line, until there are no more."""
    from csc.methods import registered
    from csc.pipelines.local.processes import PRELOADED, import_libraries_once

    for name in ("csc.pipelines.local.runner", "csc.pipelines.scenario", "csc.serving.predictor", *PRELOADED):
        importlib.import_module(name)
    registered()
    inspect.stack = callers
    gc.freeze()  # a fork would copy what its search for garbage touches
    start_python, util.spawnv_passfds = util.spawnv_passfds, _fork_instead
    import_libraries_once()
    util.spawnv_passfds = start_python
    # A fork is not the parent of the fork server, and could not ask whether it is alive.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running = forkserver.ensure_running = lambda: None
    print(server._forkserver_pid, flush=True)
    _fork_commands(sys.stdin, sys.stdout)
    _end(0)


def _fork_instead(_python: bytes, words: list[str], pipes: list[int]) -> int:
    """Fork the fork server, which would otherwise be another Python that imports everything again."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            for path in list(Path("/proc/self/fd").iterdir()):
                if int(path.name) not in (0, 1, 2, *pipes):
                    with contextlib.suppress(OSError):  # of the listing itself
                        os.close(int(path.name))
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined] # ours is held
            reduction.recvfds = partial(_receive, reduction.recvfds)
            exec(words[-1], {})
        os._exit(0)
    return pid


def _receive(receive: Callable[..., list[int]], *arguments: Any) -> list[int]:
    """Forget a command that was interrupted before it said what to fork; the fork server would end with it."""
    try:
        return receive(*arguments)
    except EOFError:
        raise ConnectionAbortedError(errno.ECONNABORTED, "interrupted") from None


def _fork_commands(requests: IO[str], answers: IO[str]) -> None:
    """Fork a command for each request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    for line in requests:
        if os.fork() == 0:
            _keep(answers, **json.loads(line))


def _fork_cells() -> None:
    """Let this command fork the cells of its study, by a process that is forked here, before there are threads."""
    global _starter
    (requests, request_pipe), (answers, answer_pipe) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(request_pipe)  # it ends when the study does
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the cells
        _fork_commands(os.fdopen(requests), os.fdopen(answer_pipe, "w"))
        os._exit(0)
    os.close(requests)
    os.close(answer_pipe)
    starter: Any = SimpleNamespace(stdin=os.fdopen(request_pipe, "w"), stdout=os.fdopen(answers))
    _starter = lambda: (starter, 0)  # type: ignore[assignment] # noqa: E731
    from csc.study import local

    def start(words: list[str], env: Mapping[str, str], **_: object) -> Forked:
        return Forked(words, env, session=False)

    local.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})  # type: ignore[assignment]


def _keep(
    answers: IO[str],
    words: list[str],
    variables: dict[str, str],
    folder: str,
    errors: str,
    cwd: str,
    terminal: str,
    session: bool,
) -> None:
    """Fork a command, say which process it is, wait for it and write down its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()  # a terminal that is opened next is the one of its session, whose Ctrl-C it gets
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a script ignores it for what runs in its background
        os.dup2(os.open(terminal or os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(terminal or f"{folder}/output", os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT) if errors else 1, 2)
        os.chdir(cwd or ".")
        os.environ.clear()
        os.environ.update(variables)
        tempfile.tempdir = None  # to be chosen by our TMPDIR
        _end(_execute(words))
    print(pid, file=answers, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(folder, "new").write_text(str(code))
    Path(folder, "new").rename(f"{folder}/code")
    os._exit(0)


def _execute(words: list[str]) -> int:
    """Be a command of `csc`, or a script; return the exit code."""
    if words[0].endswith(".py"):
        sys.argv, sys.path[0] = words, str(Path(words[0]).absolute().parent)
        runpy.run_path(words[0], run_name="__main__")
        return 0
    if words[0] == "study":
        _fork_cells()
    from csc.cli import main

    return main(words)


def _end(code: int) -> None:
    """End this process as Python does, but for taking all loaded modules apart, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
