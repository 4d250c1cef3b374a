"""The paper's own numbers, to be printed next to ours and never mixed with them."""

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from csc.report.columns import SUMMARY

__all__ = ["PaperRow", "paper_numbers", "paper_rows"]


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's tables 1 and 2.

    Attributes:
        setting: what the numbers were made with: backbone, data, replay buffer.
        buffer: replay buffer, such as `5/class`, or `none`.
        numbers: in percent, those of `SUMMARY` that the paper prints.
        note: what a reader must know of this row, often empty.
    """

    setting: str
    buffer: str
    numbers: dict[str, float]
    note: str

    @property
    def label(self) -> str:
        """How a report names the row."""
        return f"paper ({self.setting})"


def paper_rows(scenario: str, method: str) -> tuple[PaperRow, ...]:
    """Return the paper's rows for a scenario and a method: one for each replay buffer, none if it has no such result.

    >>> [(row.buffer, row.numbers["last_mAP"]) for row in paper_rows("coco-b0c10", "csc-r")]
    [('5/class', 73.7), ('20/class', 74.8), ('1000', 73.9)]
    """
    results = _results()
    setting = f"{results['backbone']}, {results['datasets'].get(scenario.partition('-')[0])}"
    return tuple(
        PaperRow(
            setting=setting if row["buffer"] == "none" else f"{setting}, buffer {row['buffer']}",
            buffer=row["buffer"],
            numbers={name: row[name] for name in SUMMARY if name in row},
            note=row.get("note", ""),
        )
        for row in results["results"].get(scenario, {}).get(method, ())
    )


def paper_numbers(scenario: str, method: str, buffer: str | None = None) -> dict[str, float] | None:
    """Return the paper's numbers, or None where it has none or, without `buffer`, more than one row.

    >>> paper_numbers("voc-b0c4", "csc")
    {'last_mAP': 85.1, 'avg_mAP': 90.4}
    >>> paper_numbers("digits-b0c2", "csc") is None
    True
    """
    rows = [row for row in paper_rows(scenario, method) if buffer in (None, row.buffer)]
    return dict(rows[0].numbers) if len(rows) == 1 else None


@functools.cache
def _results() -> dict[str, Any]:
    text = resources.files("csc.report").joinpath("paper_results.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content
