"""Steps of a local run as processes: forks of one that has imported what they need, or fresh ones.

A step on a cluster starts in a pod of its own and imports torch and MLflow there. Here that would be most of a short
run: about ten seconds for each task. So Python's fork server imports the libraries once, and each step is a fork of it.
Everything else of a step is the same: its own process, its own environment, its output line by line, and an exit code.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from csc.pipelines.local.steps import Show, Step

__all__ = ["import_libraries_once", "run_process"]

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


def import_libraries_once() -> None:
    """Start the process that steps are forks of."""
    os.environ["_KFP_RUNTIME"] = "true"  # kfp then loads what a step needs, not what a compiler needs
    forkserver.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()
    del os.environ["_KFP_RUNTIME"]


def run_process(step: Step, show: Show, method: Literal["forkserver", "spawn"] = "forkserver") -> int:
    """Run a step, hand on what it prints, and return its exit code."""
    context = multiprocessing.get_context(method)
    reader, writer = context.Pipe(duplex=False)
    variables = {**os.environ, **step.variables, "_KFP_RUNTIME": "true"}
    process = context.Process(target=_execute, args=(step.command[3], step.command[4:], variables, writer))
    process.start()
    writer.close()
    try:
        with reader, os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                show(line.rstrip("\n"))
        process.join()
    except BaseException:  # an interrupt: we would wait for the step when we end
        process.terminate()
        raise
    ended = process.exitcode or 0
    if ended < 0:
        show(f"the step was ended by {signal.Signals(-ended).name}")
    return ended


def _execute(code: str, arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    """Do in a new process what `python -m kfp.dsl.executor_main` does with the code of a component."""
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
