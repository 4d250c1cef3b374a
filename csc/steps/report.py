"""report: the results of a scenario run, as a table, a page and metrics of the parent run."""

from pathlib import Path

from csc.model import read_card
from csc.report.page import render
from csc.report.table import text_table
from csc.steps.register import read_registered
from csc.storage import atomic_file
from csc.tracking import Tracker, fetch_model

__all__ = ["report"]


def report(registered: str, page_out: str) -> str:
    """Write `report.html`, complete the parent run, and return the results table.

    Args:
        registered: `registered.json` of the last task.
        page_out: file to write.
    """
    final = read_registered(registered)
    with atomic_file(Path(page_out)) as aside:
        aside.write_text(render(final.run), encoding="utf-8")
    tracker = Tracker(read_card(fetch_model(final.model.uri)))
    tracker.log_metrics(tracker.parent, final.run.summary, final.run.tasks[-1].task)
    tracker.log_file(tracker.parent, Path(page_out))
    tracker.finish(tracker.parent)
    table = text_table(final.run)
    print(table)
    return table
