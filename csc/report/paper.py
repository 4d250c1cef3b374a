"""The paper's own numbers, to be printed next to ours and never mixed with them."""

import functools
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import yaml

from csc.artifacts import RunResults
from csc.data.published import from_elsewhere
from csc.report.columns import SUMMARY

__all__ = ["PaperRow", "paper_for", "paper_row_for", "paper_rows", "why_incomparable"]


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's tables 1 and 2."""

    label: str  # in a report: what the numbers were made with: backbone, data, replay buffer
    buffer: str  # for replay, such as `5/class`, or `none`
    numbers: dict[str, float]  # in percent, those of `SUMMARY` that the paper prints
    note: str  # what a reader must know of this row, often empty


def paper_rows(scenario: str, method: str) -> tuple[PaperRow, ...]:
    """Return the paper's rows for a scenario and a method: one for each replay buffer, none if it has no such result.

    >>> [(row.buffer, row.numbers["last_mAP"]) for row in paper_rows("coco-b0c10", "csc-r")]
    [('5/class', 73.7), ('20/class', 74.8), ('1000', 73.9)]
    """
    results = _results()
    setting = f"{results['backbone']}, {results['datasets'].get(scenario.partition('-')[0])}"
    return tuple(
        PaperRow(
            label=f"paper ({setting})" if row["buffer"] == "none" else f"paper ({setting}, buffer {row['buffer']})",
            buffer=row["buffer"],
            numbers={name: row[name] for name in SUMMARY if name in row},
            note=row.get("note", ""),
        )
        for row in results["results"].get(scenario, {}).get(method, ())
    )


def why_incomparable(held_out: bool, data_note: str) -> str:
    """Why numbers may not stand next to the paper's; empty if they may.

    `data_note` says how the data differ from the benchmark of their name, see `benchmark_note`.
    """
    if held_out:
        return "tested on held-out training images"
    return data_note if from_elsewhere(data_note) else ""


def paper_for(run: RunResults) -> tuple[PaperRow, ...]:
    """The rows of the paper that may stand next to a run; a scenario's name alone is not enough.

    Where the data are a part of the paper's benchmark, or are scaled down, the note of each row says so.
    """
    if why_incomparable(bool(run.held_out), run.data_note):
        return ()
    data = f"this run's data are {run.data_note}" if run.data_note else ""
    return tuple(
        replace(row, note="; ".join(filter(None, (row.note, data)))) for row in paper_rows(run.scenario, run.method)
    )


def paper_row_for(run: RunResults) -> PaperRow | None:
    """The one row of the paper that may stand next to a run; none if there are several, one for each replay buffer."""
    rows = paper_for(run)
    return rows[0] if len(rows) == 1 else None


@functools.cache
def _results() -> dict[str, Any]:
    text = resources.files("csc.report").joinpath("paper_results.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content
