"""collect: the tables of a study, from the runs that the tracking server knows."""

from pathlib import Path

from csc.artifacts import TableRequest
from csc.errors import BadData
from csc.retry import with_retries
from csc.storage import atomic_folder, write_bytes
from csc.study.cells import DataSource, cells, results
from csc.study.files import log_outcome, write_files
from csc.study.outcome import Outcome
from csc.study.page import study_page
from csc.study.render import markdown, text
from csc.study.spec import Study
from csc.tracking.queries import close_runs

__all__ = ["collect"]


@with_retries
def collect(request_json: str, page_out: str, table_out: str, files_out: str) -> str:
    """Write the tables of a study as HTML, as Markdown and as a folder with all forms; return them as text.

    `request_json` is a `TableRequest`, the parameter `order` of the pipeline. A cell that was to be run and is not
    finished has failed.
    """
    request = TableRequest.from_json(request_json)
    study = request.study_as(Study)
    study_cells = cells(study, {name: DataSource.open(uri) for name, uri in request.sources.items()})
    if beyond := [number for number in request.tried if number >= len(study_cells)]:
        raise BadData(f"parameter order: tried: no cell {beyond[0]}; the study has {len(study_cells)}, from 0")
    outcome = Outcome(study, tuple(results(study_cells, tried={study_cells[number].name for number in request.tried})))
    close_runs([result.cell.key for result in outcome.failed], "FAILED")
    write_bytes(page_out, study_page(outcome).encode())
    write_bytes(table_out, markdown(outcome).encode())
    with atomic_folder(Path(files_out)) as folder:
        write_files(outcome, folder)
    log_outcome(outcome)
    tables = text(outcome)
    print(tables)
    return tables
