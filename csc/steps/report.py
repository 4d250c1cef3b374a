"""report: the results of a scenario run, as a table, a page and metrics of the scenario's run."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from csc.artifacts import RegisteredTask, RunResults
from csc.data.evidence import Evidence
from csc.report.figures import curve, task_matrix
from csc.report.raster import raster
from csc.report.reliability import reliability_diagram
from csc.report.run import RunReport
from csc.retry import with_retries
from csc.storage import write_bytes
from csc.tracking.files import keep_figures
from csc.tracking.notes import run_note
from csc.tracking.runs import finish_scenario
from csc.tracking.saved_pages import FIGURES

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["report"]


@with_retries
def report(registered: str, page_out: str, table_out: str) -> str:
    """Write the page and the Markdown table of a run from the `registered.json` of its last task; return the table.

    The scenario's run in MLflow gets the summary, the page, the results, from which the page can be made again, some
    figures and a note.
    """
    final = RegisteredTask.read(registered)
    run_id, run_report = final.model.parent_run_id, RunReport.fetch(final)
    page, table, text = run_report.page(), run_report.markdown(), run_report.text()
    write_bytes(page_out, page.encode())
    write_bytes(table_out, table.encode())
    files = {"report.html": page, "results.json": json.dumps(final.to_plain(), indent=1)}
    keep_figures(run_id, _figures(final.run, run_report.evidence), final.run.last.task)
    note = run_note(final.run, table, final.model.uri)
    finish_scenario(run_id, final.run.summary, final.run.last.task, files, note)
    print(text)
    return text


def _figures(run: RunResults, evidence: Sequence[Evidence]) -> "dict[str, Image.Image]":
    """The figures that MLflow shows with the run, by name."""
    drawn = [curve(run), task_matrix(run)]
    if evidence and evidence[-1].facts.task == run.last.task:
        drawn.append(reliability_diagram(evidence[-1].facts.reliability))
    return dict(zip(FIGURES, map(raster, drawn), strict=False))
