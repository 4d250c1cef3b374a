"""report: the results of a scenario run, as a table, a page and metrics of the scenario's run."""

from csc.artifacts import RegisteredTask
from csc.report.page import render
from csc.report.table import markdown_table, text_table
from csc.retry import with_retries
from csc.storage import write_bytes
from csc.tracking.evidence import fetch_evidence
from csc.tracking.runs import finish_scenario

__all__ = ["report"]


@with_retries
def report(registered: str, page_out: str, table_out: str) -> str:
    """Write the page and the Markdown table of a run from the `registered.json` of its last task; return the table.

    The scenario's run in MLflow gets the summary and the page.
    """
    final = RegisteredTask.read(registered)
    page = render(final.run, fetch_evidence(final.model.parent_run_id))
    write_bytes(page_out, page.encode())
    write_bytes(table_out, markdown_table(final.run).encode())
    finish_scenario(final.model.parent_run_id, final.run.summary, final.run.last.task, page)
    table = text_table(final.run)
    print(table)
    return table
