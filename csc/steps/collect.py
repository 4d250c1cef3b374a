"""collect: the tables of a study, from the runs that the tracking server knows."""

import json
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from csc.data.dataset import Dataset
from csc.data.published import benchmark_note
from csc.retry import with_retries
from csc.storage import atomic_folder, write_bytes
from csc.study.cells import DataSource, cells, results
from csc.study.files import log_outcome, write_files
from csc.study.outcome import Outcome
from csc.study.page import render
from csc.study.render import markdown, text
from csc.study.spec import Study
from csc.tracking.queries import close_runs

__all__ = ["collect", "order_for"]


def order_for(study: Study, sources: Mapping[str, DataSource], tried: Container[str]) -> str:
    """What `collect` is told, as JSON; the cells that the pipeline runs go by their numbers, which are shorter."""
    content = {
        "study": msgspec.to_builtins(study),
        "sources": {name: {"data": source.data, "classes": source.classes} for name, source in sources.items()},
        "tried": [number for number, cell in enumerate(cells(study, sources)) if cell.name in tried],
    }
    return json.dumps(content, sort_keys=True)


@with_retries
def collect(order: str, page_out: str, table_out: str, files_out: str) -> str:
    """Write the tables of a study; a cell that was to be run and is not finished has failed.

    Args:
        order: what `order_for` made.
        page_out: HTML file to write.
        table_out: Markdown file to write.
        files_out: folder to write, with the tables in all forms.

    Returns:
        The tables as text.
    """
    content = json.loads(order)
    study = msgspec.convert(content["study"], Study)
    sources = {name: DataSource(**source) for name, source in content["sources"].items()}
    sources = {name: _described(source) for name, source in sources.items()}
    asked = cells(study, sources)
    tried = {asked[number].name for number in content["tried"]}
    found = results(asked, tried=tried)
    close_runs([result.cell.key for result in found if result.missing == "failed"], "FAILED")
    outcome = Outcome(study, tuple(found))
    write_bytes(page_out, render(outcome).encode())
    write_bytes(table_out, markdown(outcome).encode())
    with atomic_folder(Path(files_out)) as folder:
        write_files(outcome, folder)
    log_outcome(outcome)
    tables = text(outcome)
    print(tables)
    return tables


def _described(source: DataSource) -> DataSource:
    """A source with what its data set says of itself."""
    dataset = Dataset.open(source.data)
    return replace(source, fingerprint=dataset.fingerprint, note=benchmark_note(dataset))
