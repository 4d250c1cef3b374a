"""report: the results of a scenario run, as a table, a page and metrics of the parent run."""

from pathlib import Path

from csc.report.page import render
from csc.report.table import text_table
from csc.steps.register import read_registered
from csc.storage import atomic_file
from csc.tracking import finish_scenario

__all__ = ["report"]


def report(registered: str, page_out: str) -> str:
    """Write `report.html`, complete the parent run, and return the results table.

    Args:
        registered: `registered.json` of the last task.
        page_out: file to write.
    """
    final = read_registered(registered)
    page = render(final.run)
    with atomic_file(Path(page_out)) as aside:
        aside.write_text(page, encoding="utf-8")
    finish_scenario(final.model.parent_run_id, final.run.summary, final.run.tasks[-1].task, page)
    table = text_table(final.run)
    print(table)
    return table
