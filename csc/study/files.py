"""What a study leaves: the same tables in every form, and a run in MLflow."""

from pathlib import Path

from csc.storage import write_bytes
from csc.study.outcome import Outcome
from csc.study.page import study_page
from csc.study.render import csv_lines, latex, markdown, text
from csc.tracking.studies import log_study

__all__ = ["log_outcome", "write_files"]


def log_outcome(outcome: Outcome) -> None:
    """Keep means and deviations of a study's finished cells, its tables and its page as a run in MLflow."""
    study = outcome.study
    means = {
        f"{scenario}/{entry.row.name}/{column}": (number.mean, number.std)
        for scenario in study.scenarios
        for entry in outcome.table(scenario)
        for column in study.exported
        if (number := entry.number(column))
    }
    if means:
        log_study(study.name, means, markdown(outcome), study_page(outcome))


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the tables as text, Markdown, LaTeX, CSV and HTML, each named after the study; return the files."""
    forms = {
        "txt": f"{text(outcome)}\n",
        "md": markdown(outcome),
        "tex": latex(outcome),
        "csv": csv_lines(outcome),
        "html": study_page(outcome),
    }
    files = {folder / f"{outcome.study.name}.{ending}": content for ending, content in forms.items()}
    for path, content in files.items():
        write_bytes(path, content.encode())
    return list(files)
