"""All that there is to show of a run, from the tracking store: as a page and as tables."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from csc.artifacts import Metrics, RegisteredTask, RunResults
from csc.data.evidence import Evidence
from csc.report.page import run_page
from csc.report.table import markdown_table, old_classes_text, text_table
from csc.tracking.files import fetch_evidence
from csc.tracking.old_classes import fetch_old_classes
from csc.tracking.tracked_run import max_entropy_pair

__all__ = ["RunReport"]


class RunReport(NamedTuple):
    """What there is to show of a run: its results, and what its tasks have kept in the tracking store."""

    final: RegisteredTask  # of the last task
    evidence: Sequence[Evidence]
    old_classes: Metrics | None  # what an extended model reaches on the classes that it knew before
    max_entropy: Mapping[str, RunResults]  # the run and one that differs only in max-entropy, if there is one

    @classmethod
    def fetch(cls, final: RegisteredTask) -> "RunReport":
        """Fetch what the tasks have kept."""
        run_id = final.model.parent_run_id
        return cls(final, fetch_evidence(run_id), fetch_old_classes(run_id), max_entropy_pair(run_id))

    def page(self) -> str:
        """The page of the run."""
        return run_page(self.final.run, self.evidence, self.max_entropy, self.old_classes, self.final.model.name)

    def markdown(self) -> str:
        """The table, for documents."""
        return markdown_table(self.final.run) + self._appendix

    def text(self) -> str:
        """The table, for a terminal."""
        return text_table(self.final.run) + self._appendix

    @property
    def _appendix(self) -> str:
        return f"\n\n{old_classes_text(self.old_classes)}" if self.old_classes else ""
