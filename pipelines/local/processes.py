"""Steps of a local run as processes: forks of one that has imported what they need, or fresh ones.

A step on a cluster starts in a pod of its own and imports torch and MLflow there. Here that would be most of a short
run: about ten seconds for each task. So Python's fork server imports the libraries once, and each step is a fork of it.
Everything else of a step is the same: its own process, its own environment, its output line by line, and an exit code.

A step never outlives the process that started it. If that is told to end, the step is told too, and may save its work.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

from csc.components.__main__ import execute
from csc.distributed.process import environment
from csc.pipelines.local.steps import GRACE_SECONDS, Show, Step

__all__ = ["import_libraries_once", "run_process"]

PRELOADED = (
    "kfp.dsl.executor_main",
    "csc.training.loop",
    "csc.training.start",
    "csc.training.calibration",
    "csc.training.inspection",
    "csc.steps.train",
    "csc.steps.evaluate",
    "csc.steps.register",
    "csc.steps.report",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.tracing.processor.base_mlflow",  # which every client imports, half a second later
    "sqlalchemy.dialects.sqlite",
    "alembic.config",
    "timm",
)


def import_libraries_once() -> None:
    """Start the process that steps are forks of."""
    forkserver.set_forkserver_preload(list(PRELOADED))
    with environment({"_KFP_RUNTIME": "true"}):  # kfp then loads what a step needs, not what a compiler needs
        forkserver.ensure_running()


def run_process(step: Step, show: Show, method: Literal["forkserver", "spawn"] = "forkserver") -> int:
    """Run a step, hand on what it prints, and return its exit code."""
    forked = method == "forkserver"
    context = multiprocessing.get_context("forkserver") if forked else multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    variables = {**os.environ, **step.variables}
    process = context.Process(target=_execute, args=(step.command[3], step.command[4:], variables, writer))
    process.start()
    writer.close()
    with reader, os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as lines:
        try:
            for line in lines:
                show(line.rstrip("\n"))
            process.join()
        except BaseException:  # an interrupt
            _end(process, lines, show)
            raise
    ended = process.exitcode or 0
    if ended < 0:
        show(f"the step was ended by {signal.Signals(-ended).name}")
    return ended


def _end(process: BaseProcess, lines: Iterable[str], show: Show) -> None:
    """Tell a step to end, hand on what it has to say, and kill it if it takes too long or we are interrupted again."""
    process.terminate()
    timer = threading.Timer(GRACE_SECONDS, _kill, [process])
    timer.start()
    try:
        for line in lines:
            show(line.rstrip("\n"))
        process.join()
    finally:
        timer.cancel()
        _kill(process)


def _kill(process: BaseProcess) -> None:
    """Kill a step and all that it has started, which may hold its output open; it is the leader of their group."""
    process.kill()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _execute(code: str, arguments: list[str], variables: dict[str, str], output: Connection) -> None:
    """Run the code of a component in a new process."""
    os.setsid()  # Ctrl-C reaches the command, which tells us
    threading.Thread(target=_end_with_run, daemon=True).start()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # to be chosen by our TMPDIR
    execute(code, arguments)


def _end_with_run() -> None:
    """End this process and all that it has started when the process that runs the pipeline is gone.

    The kernel could do so only for a direct parent, and that of a fork is the fork server.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
