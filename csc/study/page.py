"""One HTML file that shows a study: its tables, its claims, and the course of every row from task to task."""

from collections.abc import Iterable
from itertools import accumulate

from csc.report import figures
from csc.report.shell import figure, html_table, page_of
from csc.report.svg import escape
from csc.study.claims import claims
from csc.study.figure import draw_intervals
from csc.study.outcome import Outcome
from csc.study.render import Table, remarks, tables

__all__ = ["remark_list", "render", "titled_table"]


def render(outcome: Outcome) -> str:
    """Return the whole page."""
    done = sum(not result.missing for result in outcome.results)
    facts = "".join(f"<span>{escape(line)}</span><br/>" for line in outcome.facts())
    body = [f'<p class="facts">{facts}<span>{done} of {len(outcome.results)} cells finished</span></p>']
    for table in tables(outcome, pm="±"):
        body += [titled_table(table), _curves(outcome, table.title)]
    if found := claims(outcome):
        rows = [(f"{claim.higher} > {claim.lower}, {claim.scenario}", claim.interval) for claim in found]
        body.append(figure(lambda width: draw_intervals(rows, width)))
    body.append("<h2>Remarks</h2>")
    body.append("<p>The paper stands on its own weights and data, our numbers on those named here.</p>")
    return page_of(outcome.title, "\n".join([*body, remark_list(remarks(outcome))]))


def titled_table(table: Table) -> str:
    """A table with its title and its note."""
    head = f"<h2>{escape(table.title)}</h2>\n<p>{escape(table.note)}</p>"
    return f"{head}\n{html_table(table.head, table.rows, 'tasks study sortable')}"


def remark_list(lines: Iterable[str]) -> str:
    """What is to be known of the numbers above."""
    return f'<ul class="note">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _curves(outcome: Outcome, scenario: str) -> str:
    """The mAP after each task, as the paper's figure 4 draws it; nothing where no row is finished."""
    lines = {entry.row.name: entry.curve for entry in outcome.table(scenario) if entry.curve}
    if not lines:
        return ""
    cell = next(result.cell for result in outcome.results if result.cell.scenario.name == scenario)
    seen = list(accumulate(cell.scenario.sizes(cell.source.classes if cell.source else 0)))
    return figure(lambda width: figures.curves(lines, seen, width))
