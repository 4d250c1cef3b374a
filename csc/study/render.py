"""The tables of a study, for a terminal, Markdown, LaTeX and spreadsheets."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from csc.report.columns import CALIBRATION, TITLES, titles
from csc.report.table import aligned, escape_markdown, markdown_rows, width_of
from csc.report.text import printable
from csc.study.claims import Claim, claims, explanation, interval_cells, signed
from csc.study.outcome import Entry, Outcome
from csc.study.spec import Row

__all__ = ["Table", "as_text", "csv_lines", "latex", "markdown", "remarks", "tables", "text"]

_CALIBRATION_NOTE = (
    "ECE and AECE (adaptive) in percent; /T: logits divided by the model's temperature T, which is kept between 0.2 "
    "and 5; own: at the model's thresholds; both are fitted on training images"
)
_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "→": r"$\rightarrow$",
    ">": "$>$",
    "β": r"$\beta$",
    "–": "--",
}


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    note: str  # what its numbers are
    head: list[str]
    rows: list[list[str]]
    left: int  # how many columns are names, set to the left
    splits: list[bool]  # for each row, whether a rule above it sets it apart from another group


def tables(outcome: Outcome, pm: str = " ± ") -> Iterator[Table]:
    """The tables of a study: one for each scenario with its calibration below, then the claims.

    The first columns are the row's label and, where rows have one, its group; then for each of the study's columns our
    number and, where the paper has any, the paper's and the difference.
    """
    study = outcome.study
    groups = any(row.group for row in study.rows)
    for scenario in study.scenarios:
        with_paper = outcome.paper_columns(scenario)
        head = ["", *([study.groups] if groups else [])]
        for column in study.columns:
            head += [TITLES[column], *(["paper", "diff"] if column in with_paper else [])]
        rows = []
        for entry in outcome.table(scenario):
            cells = _names(entry, groups)
            for index, column in enumerate(study.columns):
                cells.append(_ours(outcome, entry, column, pm) or (entry.missing if index == 0 else "") or "–")
                if column in with_paper:
                    cells += _paper(entry, column)
            rows.append(cells)
        note = "Mean over seeds" + ("; paper is the paper's number, diff ours minus it." if with_paper else ".")
        yield Table(scenario, note, head, rows, 2 if groups else 1, _splits(study.rows))
        if calibration := _calibration(outcome, scenario, pm):
            yield calibration
    if found := claims(outcome):
        yield _claims(found, study.columns[0])


def _calibration(outcome: Outcome, scenario: str, pm: str) -> Table | None:
    """What is known of confidences beyond the study's own columns, of the rows that have any of it; often nothing."""
    study, entries = outcome.study, outcome.table(scenario)
    more = [column for column in CALIBRATION if column not in study.columns]
    columns = [column for column in more if any(entry.number(column) for entry in entries)]
    known = [entry for entry in entries if any(entry.number(column) for column in columns)]
    if not known:
        return None
    groups = any(row.group for row in study.rows)
    head = ["", *([study.groups] if groups else []), *titles(columns)]
    rows = [
        [*_names(entry, groups), *(_ours(outcome, entry, column, pm) or "–" for column in columns)] for entry in known
    ]
    splits = _splits([entry.row for entry in known])
    return Table(f"{scenario}, calibration", f"{_CALIBRATION_NOTE}.", head, rows, 2 if groups else 1, splits)


def _names(entry: Entry, groups: bool) -> list[str]:
    return [printable(entry.row.label), *([printable(entry.row.group)] if groups else [])]


def _splits(rows: Sequence[Row]) -> list[bool]:
    """For each row whether it begins another group."""
    return [False, *(above.group != row.group for above, row in pairwise(rows))]


def _claims(found: Sequence[Claim], column: str) -> Table:
    paper = any(claim.paper is not None for claim in found)
    head = ["", "scenario", "difference", "95 % interval", "seeds", "images", *(["paper"] if paper else []), "verdict"]
    rows = []
    for claim in found:
        cells = [f"{printable(claim.higher)} > {printable(claim.lower)}", claim.scenario]
        cells += interval_cells(column, claim.interval)
        cells += [signed(column, claim.paper) if claim.paper is not None else "–"] if paper else []
        rows.append([*cells, claim.verdict])
    splits = [False, *(above.scenario != claim.scenario for above, claim in pairwise(found))]
    note = "First minus second, paired over seeds and over resampled test images."
    return Table(f"claims by {TITLES[column]}", note, head, rows, 2, splits)


def _ours(outcome: Outcome, entry: Entry, column: str, pm: str) -> str:
    number = entry.number(column)
    if number is None:
        return ""
    count = "" if number.n == len(outcome.study.seeds) else f" (n={number.n})"
    return f"{number.text(column, pm)}{count}"


def _paper(entry: Entry, column: str) -> list[str]:
    """The paper's number, with a star where there is a note, and the difference."""
    value, difference = entry.reference.numbers.get(column), entry.difference(column)
    if value is None:
        return ["–", ""]
    printed = f"{value:.1f}" if round(value, 1) == value and column != "H" else f"{value:.2f}"
    star = "*" if entry.reference.note else ""
    return [printed + star, "" if difference is None else signed(column, difference)]


def remarks(outcome: Outcome) -> list[str]:
    """The lines below the tables."""
    several = len(outcome.study.seeds) > 1
    calibrated = any(_calibration(outcome, scenario, "") for scenario in outcome.study.scenarios)
    return [
        *(["± is the sample standard deviation over seeds; n is given where seeds are missing"] if several else []),
        *(f"* {note}" for note in outcome.notes()),
        *([f"calibration: {_CALIBRATION_NOTE}"] if calibrated else []),
        *outcome.thresholds(),
        *outcome.presets(),
        *outcome.gaps(),
        *explanation(claims(outcome), outcome.study.columns[0]),
        *outcome.provenance(),
    ]


def text(outcome: Outcome) -> str:
    """Return the tables for a terminal."""
    return as_text(outcome.title, tables(outcome, pm="±"), remarks(outcome))


def as_text(title: str, tables: Iterable[Table], remarks: Sequence[str]) -> str:
    """Lay out tables for a terminal."""
    lines = [f" {printable(title)}"]
    for table in tables:
        cells = [table.head, *table.rows]
        widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
        body = [aligned(row, widths, table.left) for row in cells]
        rule = max(map(width_of, body)) + 1
        lines += ["", f" {table.title}", "━" * rule, body[0], "─" * rule]
        for line, splits in zip(body[1:], table.splits, strict=True):
            lines += ["─" * rule, line] if splits else [line]
        lines.append("━" * rule)
    return "\n".join([*lines, *(f" {line}" for line in remarks)])


def markdown(outcome: Outcome) -> str:
    """Return the tables as Markdown."""
    lines = [f"# {escape_markdown(outcome.title)}", ""]
    for table in tables(outcome):
        cells = [list(map(escape_markdown, row)) for row in (table.head, *table.rows)]
        lines += [f"## {table.title}", "", *markdown_rows(cells, range(table.left)), ""]
    return "\n".join([*lines, *(f"- {escape_markdown(line)}" for line in remarks(outcome)), ""])


def latex(outcome: Outcome) -> str:
    """Return the tables as LaTeX; they need the package booktabs."""
    lines = [f"% {printable(outcome.title)}: \\usepackage{{booktabs}}"]
    for table in tables(outcome):
        lines += [
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{escape_latex(outcome.title)}, {escape_latex(table.title)}}}",
            f"  \\begin{{tabular}}{{{'l' * table.left}{'r' * (len(table.head) - table.left)}}}",
            r"    \toprule",
            f"    {_latex_row(table.head)}",
            r"    \midrule",
        ]
        for row, splits in zip(table.rows, table.splits, strict=True):
            lines += [r"    \midrule"] if splits else []
            lines.append(f"    {_latex_row(row)}")
        lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {line}" for line in remarks(outcome)), ""])


def escape_latex(words: str) -> str:
    r"""Write any text so that LaTeX prints it.

    >>> escape_latex("5_000 & −1")
    '5\\_000 \\& $-$1'
    """
    return "".join(_LATEX.get(character, character) for character in words)


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def csv_lines(outcome: Outcome) -> str:
    """Return everything in long form: a line for each cell and column, with all that the number stands on."""
    out = io.StringIO()
    rows = list(_csv_rows(outcome))
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    for result in outcome.results:
        cell = result.cell
        paper = outcome.reference(cell.row, cell.scenario.name).numbers
        for column in outcome.study.exported:
            yield {
                "study": outcome.study.name,
                "scenario": cell.scenario.name,
                "row": cell.row.label,
                "group": cell.row.group,
                "method": cell.row.method,
                "seed": cell.seed,
                "status": result.missing or "finished",
                "reason": result.reason,
                "metric": column,
                "value": result.value(column),
                "paper": paper.get(column),
                **{name: result.provenance.get(name, "") for name in ("initialisation", "data", "code")},
                "run": result.run_id,
                "settings": cell.settings,
            }
