"""The claims of several studies on one screen, and the parts of a document where they and the tables stand."""

import re
from collections.abc import Sequence
from pathlib import Path

from csc.errors import BadData
from csc.report.columns import TITLES
from csc.report.table import escape_markdown
from csc.storage import write_bytes
from csc.study.claims import Claim, claims, interval_text, signed
from csc.study.outcome import Outcome
from csc.study.render import Table, markdown, markdown_lines

__all__ = ["results_document", "write_results"]


def results_document(outcomes: Sequence[Outcome]) -> str:
    """What came of some studies as Markdown: their claims first, then all tables."""
    return "\n".join(["# Claims", "", *map(_claims, outcomes), *map(markdown, outcomes)])


def write_results(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put what came of each study between its own marks of a document; the rest of it stays as it is.

    Its tables stand between `<!-- results NAME: begin -->` and `end`, its claims between `<!-- claims NAME: begin -->`
    and `end` if the document has such lines. A study without any finished cell is refused: it would wipe out what is
    there, most often because another store was meant.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for outcome in outcomes:
        name = outcome.study.name
        text = _replaced(path, text, f"results {name}", markdown(outcome))
        if f"<!-- claims {name}: " in text:
            text = _replaced(path, text, f"claims {name}", _claims(outcome))
        if len(outcome.missing) == len(outcome.results):
            raise BadData(
                f"study '{name}': none of its {len(outcome.results)} cells is finished in this tracking store, "
                f"so {path} stays as it is; name another store with --workdir or MLFLOW_TRACKING_URI"
            )
    write_bytes(path, text.encode())


def _replaced(path: Path, text: str, part: str, content: str) -> str:
    """A document with other content between the marks of a part, its heads two levels lower."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise BadData(f"{path}: expected a document with the lines '{begin}' and '{end}', to write between them")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    lower = re.sub(r"^#", "###", content.strip(), flags=re.MULTILINE)
    return f"{before}{begin}\n\n{lower}\n\n{end}{after}"


def _claims(outcome: Outcome) -> str:
    """A row for each claim of a study, a column for each scenario."""
    found, column = claims(outcome), outcome.study.columns[0]
    title = f"**{escape_markdown(outcome.title)}**, by {TITLES[column]}"
    if not found:
        return f"{title}: nothing to compare yet.\n"
    scenarios = list(dict.fromkeys(claim.scenario for claim in found))
    cells = {(claim.higher, claim.lower, claim.scenario): _cell(claim, column) for claim in found}
    pairs = dict.fromkeys((claim.higher, claim.lower) for claim in found)
    rows = [[f"{high} > {low}", *(cells.get((high, low, name), "–") for name in scenarios)] for high, low in pairs]
    words = [claim.verdict for claim in found]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return "\n".join([f"{title}: {counts}.", "", *markdown_lines(Table("", "", ["", *scenarios], rows, 1, [])), ""])


def _cell(claim: Claim, column: str) -> str:
    return f"{claim.verdict}, {signed(column, claim.interval.mean)} ({interval_text(column, claim.interval)})"
