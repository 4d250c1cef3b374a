"""Steps of a local run, forked from one process that has imported what they need.

A step on a cluster starts in a pod of its own and imports torch and MLflow there. Here that would be most of a short
run: about ten seconds for each task. So Python's fork server imports the libraries once, and each step is a fork of it.
Everything else of a step is the same: its own process, its own environment, its output line by line, and an exit code.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from csc.pipelines.local.handler import steps_started_by

__all__ = ["forked_steps", "run_forked"]

PRELOADED = (
    "kfp.dsl.executor_main",
    "csc.training.loop",
    "csc.training.start",
    "csc.steps.train",
    "csc.steps.evaluate",
    "csc.steps.register",
    "csc.steps.report",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "timm",
)


@contextlib.contextmanager
def forked_steps() -> Iterator[None]:
    """Let kfp.local fork the steps of components that are Python functions, as all of ours are."""
    with _environment(_KFP_RUNTIME="true"):  # kfp then loads what a step needs, not what a compiler needs
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    with steps_started_by(lambda _, command, environment: run_forked(command, environment)):
        yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_forked(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a step, print what it prints, and return its exit code.

    Args:
        command: `sh -c SCRIPT CODE --executor_input …`, as kfp compiles it.
        environment: variables on top of our own.
    """
    code, arguments = command[3], list(command[4:])
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    variables = {**os.environ, **environment, "_KFP_RUNTIME": "true"}
    step = context.Process(target=_step, args=(code, arguments, variables, writer))
    step.start()
    writer.close()
    try:
        with reader, os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                print(line, end="")
        step.join()
    except BaseException:  # an interrupt: we would wait for the step when we end
        step.terminate()
        raise
    ended = step.exitcode or 0
    if ended < 0:
        print(f"the step was ended by {signal.Signals(-ended).name}")
    return ended


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
