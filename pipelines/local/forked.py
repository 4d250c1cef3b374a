"""Steps of a local run, forked from one process that has imported what they need.

A step on a cluster starts in a pod of its own and imports torch and MLflow there. Here that would be most of a short
run: about ten seconds for each task. So kfp's subprocess runner is given another way to start a process: Python's fork
server imports the libraries once, and each step is a fork of it. Everything else of a step is the same: its own
process, its own environment, its output line by line, and an exit code.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from kfp.local import subprocess_task_handler

__all__ = ["forked_steps"]

PRELOADED = (
    "kfp.dsl.executor_main",
    "csc.training.loop",
    "csc.steps.train",
    "csc.steps.evaluate",
    "csc.steps.register",
    "csc.steps.report",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "timm",
)

# Starting a process looks for others that have ended, and so reads exit codes that threads of other steps wait for.
_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def forked_steps() -> Iterator[None]:
    """Let kfp's subprocess runner fork the steps of components that are Python functions, as all of ours are."""
    original = subprocess_task_handler.run_local_subprocess
    with _environment(_KFP_RUNTIME="true"):  # kfp then loads what a step needs, not what a compiler needs
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    subprocess_task_handler.run_local_subprocess = _run
    try:
        yield
    finally:
        subprocess_task_handler.run_local_subprocess = original


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(full_command: Sequence[str], env_vars: Mapping[str, str] | None = None) -> int:
    """Stand in for kfp's function of the same arguments: print what a step prints, return its exit code."""
    code, arguments = full_command[3], full_command[4:]  # sh -c SCRIPT CODE --executor_input …
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    environment = {**os.environ, **(env_vars or {}), "_KFP_RUNTIME": "true"}
    step = context.Process(target=_step, args=(code, list(arguments), environment, writer))
    with _ONE_AT_A_TIME:
        step.start()
    writer.close()
    with reader, os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            print(line, end="")
    with _ONE_AT_A_TIME:
        step.join()
    return step.exitcode or 0


def _step(code: str, arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    """Be a step: what `python -m kfp.dsl.executor_main` does with the code of a component."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    with tempfile.TemporaryDirectory(prefix="csc-step-") as folder:
        module = Path(folder) / "ephemeral_component.py"
        module.write_text(code, encoding="utf-8")
        sys.argv = ["executor_main", "--component_module_path", str(module), *arguments]
        from kfp.dsl.executor_main import executor_main

        executor_main()
