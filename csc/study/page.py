"""One HTML file that shows a study: its tables, its claims, and the course of every row from task to task."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from csc.artifacts import Metrics
from csc.report import figures
from csc.report.layout import figure, html_page, html_table
from csc.report.svg import escape
from csc.study.cells import Result
from csc.study.claims import claims
from csc.study.figure import draw_intervals
from csc.study.outcome import Outcome
from csc.study.render import Table, remarks, tables
from csc.tracking.tracked_run import results_of

__all__ = ["confidence_part", "remark_list", "study_page", "titled_table"]


def study_page(outcome: Outcome) -> str:
    """Return the whole page."""
    done = sum(not result.missing for result in outcome.results)
    provenance = "".join(f"<span>{escape(line)}</span><br/>" for line in outcome.provenance())
    body = [f'<p class="facts">{provenance}<span>{done} of {len(outcome.results)} cells finished</span></p>']
    for table in tables(outcome, pm="±"):
        body += [titled_table(table), _curves(outcome, table.title), _max_entropy(outcome, table.title)]
    if found := claims(outcome):
        rows = [(f"{claim.higher} > {claim.lower}, {claim.scenario}", claim.interval) for claim in found]
        body.append(figure(lambda width: draw_intervals(rows, width)))
    body.append("<h2>Remarks</h2>")
    body.append("<p>The paper stands on its own weights and data, our numbers on those named here.</p>")
    return html_page(outcome.title, "\n".join([*body, remark_list(remarks(outcome))]))


def titled_table(table: Table) -> str:
    """A table with its title and its note."""
    head = f"<h2>{escape(table.title)}</h2>\n<p>{escape(table.note)}</p>"
    return f"{head}\n{html_table(table.head, table.rows, 'tasks study sortable')}"


def confidence_part(models: Mapping[str, Metrics]) -> str:
    """How confident models are after the last task, next to each other."""
    return f"""<h3>Confidences</h3>
<p>Labels by the confidence of the model after the last task, on a logarithmic scale and of one seed. Absent labels to
the right of the threshold are false positives.</p>
{figure(lambda width: figures.confidences(models, width))}"""


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


def _max_entropy(outcome: Outcome, scenario: str) -> str:
    """The confidences of rows that differ in max-entropy alone, as the paper's figure 3 draws them."""
    alike: dict[str, dict[bool, Result]] = {}  # by all other settings: a run without it, and one with it
    for result in outcome.results:
        if result.run_id and result.cell.config is not None and result.cell.scenario.name == scenario:
            settings = {key: value for key, value in result.cell.config.flat().items() if key != "seed"}
            uses_it = bool(settings.pop("max_entropy.beta", 0))
            alike.setdefault(repr(settings), {}).setdefault(uses_it, result)
    models: dict[str, Metrics] = {}
    for pair in alike.values():
        both = [pair[False], pair[True]] if len(pair) == 2 else []
        runs = {result.cell.row.name: results_of(result.run_id) for result in both}
        known = {name: run.last.metrics for name, run in runs.items() if run is not None}
        models |= known if len(known) == 2 else {}
    return confidence_part(models) if models else ""
