"""One HTML file that shows a study: its tables, and the course of every row from task to task."""

from itertools import accumulate

from csc.report import figures
from csc.report.figures import escape
from csc.report.page import page_of, table_row
from csc.study.outcome import Outcome
from csc.study.render import Table, remarks, tables

__all__ = ["html_table", "render"]


def render(outcome: Outcome) -> str:
    """Return the whole page."""
    done = sum(not result.missing for result in outcome.results)
    facts = "".join(f"<span>{escape(line)}</span><br/>" for line in outcome.facts())
    body = [f'<p class="facts">{facts}<span>{done} of {len(outcome.results)} cells finished</span></p>']
    for table in tables(outcome, pm="±"):
        body += [f"<h2>{escape(table.title)}</h2>", html_table(table), _curves(outcome, table.title)]
    told = "".join(f"<li>{escape(line)}</li>" for line in remarks(outcome))
    body += [
        "<h2>Remarks</h2>",
        "<p>The paper stands on its own weights and data, our numbers on those named here.</p>",
    ]
    return page_of(outcome.title, "\n".join([*body, f'<ul class="note">{told}</ul>']))


def html_table(table: Table) -> str:
    """A table with its note."""
    body = "\n".join(table_row("td", row) for row in table.rows)
    return (
        f"<p>{escape(table.note)}</p>"
        f'<div class="wide"><table class="tasks study"><thead>{table_row("th", table.head)}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _curves(outcome: Outcome, scenario: str) -> str:
    """The mAP after each task, as the paper's figure 4 draws it; nothing where no row is finished."""
    lines = {entry.row.name: entry.curve for entry in outcome.table(scenario) if entry.curve}
    if not lines:
        return ""
    cell = next(result.cell for result in outcome.results if result.cell.scenario.name == scenario)
    classes = cell.source.classes if cell.source else 0
    return f"<figure>{figures.curves(lines, list(accumulate(cell.scenario.sizes(classes))))}</figure>"
