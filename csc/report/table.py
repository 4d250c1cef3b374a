"""One row per task, for a terminal or a README."""

import html
import re
import unicodedata
from collections.abc import Container, Sequence
from textwrap import wrap

from csc.artifacts import HEADLINE, Metrics, RunResults
from csc.report.columns import SUMMARY, titles
from csc.report.paper import paper_for
from csc.report.text import printable

__all__ = [
    "TASK_COLUMNS",
    "WIDTH",
    "aligned",
    "comparison",
    "escape_markdown",
    "markdown_rows",
    "markdown_table",
    "notes",
    "old_classes_text",
    "provenance",
    "shortened",
    "task_rows",
    "text_table",
    "width_of",
]

WIDTH = 100
TASK_COLUMNS = ("task", "new classes", "seen", "train images", "test images", *HEADLINE)
AVERAGED = ("mAP", "CF1", "OF1")  # for which a mean over tasks says something
GAP = "  "


def text_table(run: RunResults) -> str:
    """Return the run as an aligned table for a terminal of 100 columns."""
    header = [name.removesuffix(" images") for name in TASK_COLUMNS]
    rows = [header, *task_rows(run)]
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    room = WIDTH - 2 - sum(widths) + widths[1] - len(GAP) * (len(widths) - 1)
    widths[1] = min(widths[1], max(room, len(header[1])))
    for row, task in zip(rows[1:-1], run.tasks, strict=True):
        row[0] = row[0].rjust(len(header[0]))
        row[1] = shortened(task.new, widths[1])
    tasks = [aligned(row, widths, left=2) for row in rows]
    compared = [["", *titles(SUMMARY)], *comparison(run)]
    compared_widths = [max(map(width_of, column)) for column in zip(*compared, strict=True)]
    ours_and_theirs = [aligned(row, compared_widths, left=1) for row in compared]
    about = [f" {name} {value}" for name, value in provenance(run).items()]
    wrapped = [wrap(f"* {note}", WIDTH, initial_indent=" ", subsequent_indent="   ") for note in notes(run)]
    rule = max(width_of(line) for line in [*tasks, *ours_and_theirs]) + 1
    thick, thin = "━" * rule, "─" * rule
    return "\n".join(
        [
            f" {printable(run.scenario)} · {printable(run.method)}",
            *[thick, tasks[0], thin, *tasks[1:-1], thin, tasks[-1], thick],
            *([ours_and_theirs[0], thin, *ours_and_theirs[1:], thick] if len(compared) > 2 else []),
            *(line for lines in wrapped for line in lines),
            about[0],  # the initialisation may be long
            " ·".join(about[1:]),
        ]
    )


def markdown_table(run: RunResults) -> str:
    """Return the run as Markdown tables: its tasks, then its numbers next to the paper's."""
    tables = [([[*TASK_COLUMNS], *task_rows(run)], 1), ([["", *titles(SUMMARY)], *comparison(run)], 0)]
    lines = []
    for rows, name_column in tables:
        lines += [*markdown_rows([list(map(escape_markdown, row)) for row in rows], {name_column}), ""]
    about = " · ".join(f"{name} {escape_markdown(value)}" for name, value in provenance(run).items())
    return "\n".join([*lines, *[f"\\* {escape_markdown(note)}\n" for note in notes(run)], about])


def markdown_rows(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """The lines of a table whose cells are Markdown already, the head first; `left` are columns set to the left."""
    head, *body = rows
    rule = [":--" if column in left else "--:" for column in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *body)]


def old_classes_text(metrics: Metrics) -> str:
    """What an extended model reaches on the classes that it knew before, in a sentence."""
    numbers = " · ".join(f"{name} {metrics[name]:.1f}" for name in HEADLINE)
    return f"The {len(metrics.AP)} old classes on {metrics.images:,} images of the data set of --test: {numbers}"


def task_rows(run: RunResults) -> list[list[str]]:
    """Return the cells of `TASK_COLUMNS` for each task, then those of the averages."""
    rows = []
    for task in run.tasks:
        names = ", ".join(printable(name) for name in task.new)
        images = f"{task.train_images:,}", f"{task.metrics.images:,}"
        numbers = (f"{task.metrics[name]:.1f}" for name in HEADLINE)
        rows.append([str(task.task), names, str(len(task.seen)), *images, *numbers])
    means = {name: sum(task.metrics[name] for task in run.tasks) / len(run.tasks) for name in AVERAGED}
    averages = [f"{means[name]:.1f}" if name in means else "" for name in HEADLINE]
    return [*rows, ["average", "", "", "", "", *averages]]


def comparison(run: RunResults) -> list[list[str]]:
    """Return the run's last and average numbers, then the paper's with the setting they come from.

    Returns:
        Per row a label, then the cells for `SUMMARY`; `–` where there is no number.
    """
    rows = [("this run", run.summary)]
    rows += [(f"{row.label} *" if row.note else row.label, row.numbers) for row in paper_for(run)]
    return [[label, *(f"{numbers[n]:.1f}" if n in numbers else "–" for n in SUMMARY)] for label, numbers in rows]


def notes(run: RunResults) -> list[str]:
    """Return what a reader must know of the paper's rows that `comparison` marks with a star."""
    return sorted({printable(row.note) for row in paper_for(run)} - {""})


def provenance(run: RunResults) -> dict[str, str]:
    """Return what a result must state to be worth something: weights, seed, data and code."""
    return {
        "initialisation": printable(run.initialisation),
        "seed": str(run.seed),
        "data": printable(run.data_fingerprint[:12])
        + (f" (NOT the test images: tested on 1 of {run.held_out} training images)" if run.held_out else "")
        + (f" ({printable(run.data_note)})" if run.data_note else ""),
        "code": printable(run.code_version),
    }


def shortened(names: Sequence[str], width: int) -> str:
    """Join as many names as fit and say how many are left out.

    >>> shortened(["aeroplane", "bicycle", "bird", "boat"], 24)
    'aeroplane, bicycle, +2'
    >>> shortened(["Ridge", "Ridge, mean"], 24)
    'Ridge; Ridge, mean'
    """
    shown = [printable(name) for name in names]
    comma = "; " if any("," in name for name in shown) else ", "
    for kept in range(len(shown), 0, -1):
        text = comma.join(shown[:kept] + ([f"+{len(shown) - kept}"] if kept < len(shown) else []))
        if width_of(text) <= width:
            return text
    rest = f"{comma}+{len(shown) - 1}" if len(shown) > 1 else ""
    first = shown[0] if shown else ""
    while first and width_of(first) + 1 + len(rest) > width:
        first = first[:-1]
    return f"{first}…{rest}" if shown else ""


def aligned(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    """Put cells under each other: the first `left` columns to the left, numbers to the right."""
    cells = []
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        blank = " " * (width - width_of(cell))
        cells.append(cell + blank if column < left else blank + cell)
    return (" " + GAP.join(cells)).rstrip()


def width_of(text: str) -> int:
    """Count the columns a terminal needs; East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def escape_markdown(text: str) -> str:
    """Escape what Markdown would read as a cell border, an emphasis or HTML."""
    return re.sub(r"[\\|*_`]", r"\\\g<0>", html.escape(text, quote=False))
