"""`csc report`: the page of a run, made again from what the tracking store keeps."""

from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.cli.workdir import run_argument, tracked_workdir, workdir_argument
from csc.errors import BadData
from csc.storage import local_path, write_bytes
from csc.tracking.names import page_name

__all__ = ["REPORT"]


def _arguments(parser: ArgumentParser) -> None:
    run_argument(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="page to write (default: in the work folder)")
    workdir_argument(parser)


def _report(arguments: Namespace) -> int:
    output = local_path(arguments.output) if arguments.output else None
    tracked_workdir(arguments.workdir)
    from csc.report.run import RunReport
    from csc.tracking.tracked_run import find_run

    found = find_run(arguments.run)
    if found.registered_task is None:
        raise BadData(f"run {found.name}: no task is finished yet, so there is nothing to report")
    page = output or local_path(arguments.workdir) / f"{page_name(found.scenario, found.config)}.html"
    report = RunReport.fetch(found.registered_task)
    write_bytes(page, report.page().encode())
    print(f"{report.text()}\n\nreport    {page}")
    return 0


REPORT = Command("make the page of a run again from the tracking store", _report, _arguments)
