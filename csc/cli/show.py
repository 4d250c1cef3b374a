"""`csc show`: a run in the terminal."""

import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from csc.cli.command import Command
from csc.cli.workdir import run_argument, tracked_workdir, workdir_argument
from csc.errors import BadConfig
from csc.tracking.names import settings_text

if TYPE_CHECKING:
    from csc.artifacts import TaskResult
    from csc.tracking.tracked_run import TrackedRun

__all__ = ["SHOW", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"


def _arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    workdir_argument(parser)


def _show(arguments: Namespace) -> int:
    tracked_workdir(arguments.workdir)
    from csc.report.findings import findings
    from csc.report.table import WIDTH, old_classes_text, text_table
    from csc.report.text import printable
    from csc.tracking.old_classes import fetch_old_classes
    from csc.tracking.tracked_run import find_run

    run = find_run(arguments.run)
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started / 1000))
    print(f"{printable(run.name)} · {run.status.lower()} · started {started} · run {run.run_id}")
    print(f"settings  {_changes(run)}")
    if run.registered_task is None:
        print("no task is finished yet")
        return 0
    print(f"model     {run.registered_task.model.uri}")
    print(f"\n{text_table(run.registered_task.run)}\n")
    for finding in findings(run.registered_task.run):
        print(textwrap.fill(printable(finding.text), WIDTH, initial_indent=" • ", subsequent_indent="   "))
    print()
    if old_classes := fetch_old_classes(run.run_id):
        print(f"{old_classes_text(old_classes)}\n")
    print("AP of each class after each task")
    tasks = run.registered_task.run.tasks
    width = max(len(printable(name)) for name in tasks[-1].seen)
    for name in tasks[-1].seen:
        print(f" {printable(name):<{width}}  {_class_line(name, tasks)}")
    return 0


def _changes(run: "TrackedRun") -> str:
    try:
        return " · ".join(settings_text(run.changed)) or "the method's own"
    except BadConfig as error:
        return f"of another version: {error}"


def _class_line(name: str, tasks: "Sequence[TaskResult]") -> str:
    """How the AP of a class went, from the task that brought it to the last one."""
    known = [task.metrics.AP[name] for task in tasks if name in task.seen]
    drawn = " " * (len(tasks) - len(known)) + sparkline(known)
    if len(known) == 1:
        return f"{drawn}  {known[-1]:5.1f}"
    return f"{drawn}  {known[0]:5.1f} → {known[-1]:5.1f}  ({known[-1] - known[0]:+.1f})"


def sparkline(values: Sequence[float]) -> str:
    """Percentages as a row of bars.

    >>> sparkline([0, 50, 99.9, 100])
    '▁▅██'
    """
    return "".join(_LEVELS[min(int(value / 100 * len(_LEVELS)), len(_LEVELS) - 1)] for value in values)


SHOW = Command("show a run in the terminal: settings, results, and how each class went", _show, _arguments)
