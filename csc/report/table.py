"""One row per task, for a terminal or a README."""

import html
import unicodedata
from collections.abc import Sequence
from textwrap import wrap

from csc.artifacts import HEADLINE, Metrics, Run, TaskResult
from csc.report.columns import SUMMARY, titles
from csc.report.paper import paper_for
from csc.report.text import printable

__all__ = [
    "WIDTH",
    "aligned",
    "averages",
    "comparison",
    "escape_markdown",
    "facts",
    "markdown_table",
    "notes",
    "old_classes_text",
    "shortened",
    "text_table",
    "width_of",
]

WIDTH = 100
AVERAGED = ("mAP", "CF1", "OF1")
GAP = "  "


def text_table(run: Run) -> str:
    """Return the run as an aligned table for a terminal of 100 columns."""
    header = ["task", "new classes", "seen", "train", "test", *HEADLINE]
    rows = [[*_counts(task), *_numbers(task)] for task in run.tasks]
    average = ["average", "", "", "", "", *(averages(run).get(name, "") for name in HEADLINE)]
    widths = [max(width_of(row[column]) for row in [header, *rows, average]) for column in range(len(header))]
    room = WIDTH - 2 - sum(widths) + widths[1] - len(GAP) * (len(widths) - 1)
    widths[1] = min(widths[1], max(room, len(header[1])))
    for row, task in zip(rows, run.tasks, strict=True):
        row[0] = row[0].rjust(len(header[0]))
        row[1] = shortened(task.new, widths[1])
    tasks = [aligned(row, widths, left=2) for row in [header, *rows, average]]
    compared = [["", *titles(SUMMARY)], *([label, *numbers] for label, numbers in comparison(run))]
    compared_widths = [max(width_of(row[column]) for row in compared) for column in range(len(compared[0]))]
    ours_and_theirs = [aligned(row, compared_widths, left=1) for row in compared]
    about = [f" {name} {value}" for name, value in facts(run).items()]
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


def markdown_table(run: Run) -> str:
    """Return the run as Markdown tables: its tasks, then its numbers next to the paper's."""
    rows = [
        ["task", "new classes", "seen", "train images", "test images", *HEADLINE],
        ["--:", ":--", *["--:"] * (3 + len(HEADLINE))],
        *([*_counts(task), *_numbers(task)] for task in run.tasks),
        ["average", "", "", "", "", *(averages(run).get(name, "") for name in HEADLINE)],
        [],
        ["", *titles(SUMMARY)],
        [":--", *["--:"] * len(SUMMARY)],
        *([label, *numbers] for label, numbers in comparison(run)),
    ]
    lines = ["| " + " | ".join(escape_markdown(cell) for cell in row) + " |" if row else "" for row in rows]
    about = " · ".join(f"{name} {escape_markdown(value)}" for name, value in facts(run).items())
    return "\n".join([*lines, "", *[f"\\* {escape_markdown(note)}\n" for note in notes(run)], about])


def old_classes_text(judged: Metrics) -> str:
    """What an extended model reaches on the classes that it knew before, in a sentence."""
    numbers = " · ".join(f"{name} {judged[name]:.1f}" for name in HEADLINE)
    return f"The {len(judged.AP)} old classes on {judged.images:,} images of the data set of --test: {numbers}"


def averages(run: Run) -> dict[str, str]:
    """Return the means over all tasks of the metrics for which a mean says something."""
    return {name: f"{sum(t.metrics[name] for t in run.tasks) / len(run.tasks):.1f}" for name in AVERAGED}


def comparison(run: Run) -> list[tuple[str, list[str]]]:
    """Return the run's last and average numbers, then the paper's with the setting they come from.

    Returns:
        A label and the cells for `SUMMARY` per row; `–` where there is no number.
    """
    rows = [("this run", run.summary)]
    rows += [(f"{row.label} *" if row.note else row.label, row.numbers) for row in paper_for(run)]
    return [(label, [f"{numbers[n]:.1f}" if n in numbers else "–" for n in SUMMARY]) for label, numbers in rows]


def notes(run: Run) -> list[str]:
    """Return what a reader must know of the paper's rows that `comparison` marks with a star."""
    return sorted({printable(row.note) for row in paper_for(run)} - {""})


def facts(run: Run) -> dict[str, str]:
    """Return what a result must state to be worth something."""
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
    """
    shown = [printable(name) for name in names]
    for kept in range(len(shown), 0, -1):
        text = ", ".join(shown[:kept] + ([f"+{len(shown) - kept}"] if kept < len(shown) else []))
        if width_of(text) <= width:
            return text
    rest = f", +{len(shown) - 1}" if len(shown) > 1 else ""
    first = shown[0] if shown else ""
    while first and width_of(first) + 1 + len(rest) > width:
        first = first[:-1]
    return f"{first}…{rest}" if shown else ""


def _counts(task: TaskResult) -> list[str]:
    images = f"{task.train_images:,}", f"{task.metrics['images']:,}"
    return [str(task.task), ", ".join(printable(name) for name in task.new), str(len(task.seen)), *images]


def _numbers(task: TaskResult) -> list[str]:
    return [f"{task.metrics[name]:.1f}" for name in HEADLINE]


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
    escaped = html.escape(text, quote=False).replace("\\", "\\\\")
    for mark in "|*_`":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped
