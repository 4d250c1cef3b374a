"""`csc compare`: runs of the tracking store next to each other, as a table and a page."""

from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.cli.workdir import tracked_workdir, workdir_argument
from csc.errors import BadConfig
from csc.report.text import printable_line
from csc.storage import join, local_path, write_bytes

__all__ = ["COMPARE"]


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="id or name of a run, a scenario or models:/NAME@ALIAS; the others are compared with the first",
    )
    parser.add_argument("--last", type=int, metavar="N", help="the N runs that were finished last, oldest first")
    parser.add_argument("-o", "--output", metavar="FILE", help="page to write (default: WORKDIR/comparison.html)")
    workdir_argument(parser)


def _compare(arguments: Namespace) -> int:
    if bool(arguments.runs) == (arguments.last is not None):
        raise BadConfig("csc compare: name at least two runs, or give --last N")
    if len(arguments.runs) == 1 or (arguments.last is not None and arguments.last < 2):
        raise BadConfig("csc compare: expected at least two runs")
    page = local_path(arguments.output or join(arguments.workdir, "comparison.html"))
    tracked_workdir(arguments.workdir)
    from csc.study.compare import compare, comparison_page, comparison_text
    from csc.tracking.queries import newest_runs
    from csc.tracking.tracked_run import find_run

    names = arguments.runs or newest_runs(arguments.last)[::-1]
    if len(names) < 2:
        raise BadConfig(f"csc compare --last {arguments.last}: only {len(names)} finished runs in the tracking store")
    found = compare([find_run(name) for name in names])
    write_bytes(page, comparison_page(found).encode())
    for line in comparison_text(found).splitlines():  # with names that the server has given
        print(printable_line(line))
    print(f"\npage      {page}")
    return 0


COMPARE = Command("compare runs: a table and a page, with what the differences are worth", _compare, _arguments)
