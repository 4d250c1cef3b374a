"""Run a compiled pipeline on this machine with kfp.local."""

import contextlib
import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from kfp import components, local

from csc.errors import CscError
from csc.pipelines.local.cache import StepCache, cache_folder, cached_steps
from csc.pipelines.local.containers import containers_for
from csc.pipelines.local.display import Display, PlainDisplay
from csc.pipelines.local.interrupts import raise_if_interrupted
from csc.pipelines.local.processes import import_libraries_once, run_process
from csc.pipelines.local.reporter import RunReporter, step_titles
from csc.pipelines.local.steps import RunStep, Step, steps_run_by
from csc.tracking.server import tracking_uri

__all__ = ["LocalRun", "Runner", "StepCrashed", "StepRefused", "run_compiled"]

Runner = Literal["forked", "subprocess", "docker"]


class StepRefused(CscError):
    """A step that refused its input; the message is the step's own."""


class StepCrashed(Exception):
    """A step that ended in an unforeseen error; the message is the end of its output."""


@dataclass(frozen=True)
class LocalRun:
    """A finished run: its results, what was reused, and the seconds each executed step took."""

    table: str
    page: Path
    reused: tuple[str, ...]
    seconds: dict[str, float]


def run_compiled(
    package: Path,
    arguments: Mapping[str, str],
    workdir: Path,
    display: Display | None = None,
    *,
    runner: Runner = "forked",
    variables: Mapping[str, str] = {},
) -> LocalRun:
    """Execute a compiled pipeline file; finished steps of earlier tries are reused.

    Outputs, cache and logs are in the work folder below the name of the file. What happens is told in plain lines if no
    display is given. A step is a fork of a process that has imported everything, a fresh process in this environment,
    or one in a container of its image; it gets the `variables` on top of its environment.
    """
    name = package.stem
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # the steps inherit it, and their lines come as they are printed
    with _step_runner(runner, package, arguments, workdir) as run:
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(workdir / "pipeline" / name))
        pipeline = components.load_component_from_file(str(package))
        log = workdir / "logs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as file:
            display = display or PlainDisplay(sys.stdout)
            reporter = RunReporter(display, file, step_titles(pipeline.pipeline_spec))
            shared = {**variables, **({"CSC_PROGRESS": "1"} if display.reports else {})}
            cache = StepCache(cache_folder(workdir, name, tracking_uri()), reporter.reuse, reporter.repair)
            cached = cached_steps(pipeline.pipeline_spec)

            def run_step(step: Step) -> int:
                raise_if_interrupted()
                if step.name in cached and cache.restore(step):
                    return 0
                reporter.begin(step.name)
                code = run(replace(step, variables={**step.variables, **shared}), reporter.line)
                reporter.end(code)
                if code == 0 and step.name in cached:
                    cache.keep(step)
                return code

            try:
                with steps_run_by(run_step), display, _kfp_output_in(file):
                    outputs = pipeline(**arguments).outputs
            except RuntimeError:  # of kfp: a step failed
                if reporter.error is not None:
                    raise StepRefused(reporter.error) from None
                shown = [line for line in reporter.tail if line.strip(" -")]
                reason = shown[-1].strip() if shown else "no output"
                said = f"csc: {reporter.current}: {reason}\nthe whole log is {log}"
                raise StepCrashed("\n".join(shown) + f"\n{said}") from None
            except KeyboardInterrupt as error:
                error.args = (f"in {reporter.current}",)
                raise
    return LocalRun(outputs["table"], Path(outputs["page"].path), tuple(reporter.reused), reporter.seconds)


def _step_runner(
    runner: Runner, package: Path, arguments: Mapping[str, str], workdir: Path
) -> contextlib.AbstractContextManager[RunStep]:
    """What runs a step to its end."""
    if runner == "docker":
        return containers_for(package, arguments, workdir)
    if runner == "subprocess":
        return contextlib.nullcontext(functools.partial(run_process, method="spawn"))
    import_libraries_once()
    return contextlib.nullcontext(run_process)


@contextlib.contextmanager
def _kfp_output_in(log: TextIO) -> Iterator[None]:
    """Send what kfp itself prints and logs to a file."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers, root.level = [logging.StreamHandler(log)], logging.INFO
    try:
        with contextlib.redirect_stdout(log), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # settings that only a cluster can honour
            yield
    finally:
        root.handlers, root.level = handlers, level
