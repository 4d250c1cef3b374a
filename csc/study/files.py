"""The files that a study leaves: the same tables in every form."""

from pathlib import Path

from csc.storage import write_bytes
from csc.study.outcome import Outcome
from csc.study.page import render
from csc.study.render import csv_lines, latex, markdown, text

__all__ = ["write_files"]


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the tables as text, Markdown, LaTeX, CSV and HTML, each named after the study; return the files."""
    forms = {
        "txt": lambda outcome: text(outcome) + "\n",
        "md": markdown,
        "tex": latex,
        "csv": csv_lines,
        "html": render,
    }
    written = []
    for ending, form in forms.items():
        written.append(folder / f"{outcome.study.name}.{ending}")
        write_bytes(written[-1], form(outcome).encode())
    return written
