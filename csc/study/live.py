"""A study while it runs: on a terminal the cells at work and the table as it fills, elsewhere plain lines."""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from csc.report.text import printable
from csc.study.cells import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["RunningCell", "live_view", "picture"]


class RunningCell(NamedTuple):
    """A cell that is running."""

    name: str
    seconds: float
    line: str  # the last one that it printed


@contextlib.contextmanager
def live_view(at_work: Callable[[], list[RunningCell]], finished: Sequence[Result]) -> Iterator[Callable[[str], None]]:
    """Show the cells at work, and the results so far, until the end of the context; yields what prints a line."""
    if not sys.stdout.isatty():
        yield lambda line: print(line, flush=True)
        return
    from rich.live import Live

    with Live(get_renderable=lambda: picture(at_work(), finished), refresh_per_second=2, transient=True) as live:
        yield lambda line: live.console.print(line, markup=False, highlight=False)


def picture(at_work: Sequence[RunningCell], finished: Sequence[Result]) -> "RenderableType":
    """The cells at work, and the last mAP of what is finished: a row for each row, a column for each scenario."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = Table.grid(padding=(0, 2))
    for cell in at_work:
        minutes, seconds = divmod(int(cell.seconds), 60)
        cells.add_row(Text(cell.name), Text(f"{minutes}:{seconds:02d}", style="dim"), Text(printable(cell.line)))
    values: dict[str, dict[str, list[float]]] = {}
    for result in finished:
        of_row = values.setdefault(result.cell.row.name, {})
        of_row.setdefault(result.cell.scenario.name, []).append(result.metrics["last_mAP"])
    scenarios = list(dict.fromkeys(name for of_row in values.values() for name in of_row))
    means = Table(box=None, padding=(0, 2))
    for head in ("last mAP so far", *scenarios):
        means.add_column(Text(head, style="dim"), justify="left" if head not in scenarios else "right")
    for name, of_row in values.items():
        means.add_row(Text(name), *(Text(_mean(of_row.get(scenario, []))) for scenario in scenarios))
    return Group(means, cells) if values else cells


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f} (n={len(values)})" if values else "–"
