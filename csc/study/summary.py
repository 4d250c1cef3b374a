"""The claims of several studies on one screen, and the place in a document where they and the tables stand."""

import re
from collections.abc import Sequence
from pathlib import Path

from csc.errors import BadData
from csc.report.table import escape_markdown
from csc.storage import write_bytes
from csc.study.claims import Claim, claims, interval_text, signed
from csc.study.outcome import Outcome
from csc.study.render import Table, markdown, markdown_lines
from csc.study.spec import COLUMNS

__all__ = ["results_document", "write_between"]

_BEGIN, _END = "<!-- results: begin -->", "<!-- results: end -->"


def results_document(outcomes: Sequence[Outcome]) -> str:
    """What came of some studies as Markdown: their claims first, then all tables."""
    lines = ["# Claims", ""]
    for outcome in outcomes:
        lines += _claims(outcome)
    return "\n".join([*lines, *map(markdown, outcomes)])


def _claims(outcome: Outcome) -> list[str]:
    """A row for each claim of a study, a column for each scenario."""
    found, column = claims(outcome), outcome.study.columns[0]
    title = f"**{escape_markdown(outcome.title)}**, by {COLUMNS[column]}"
    if not found:
        return [f"{title}: nothing to compare yet.", ""]
    scenarios = list(dict.fromkeys(claim.scenario for claim in found))
    cells = {(claim.higher, claim.lower, claim.scenario): _cell(claim, column) for claim in found}
    pairs = dict.fromkeys((claim.higher, claim.lower) for claim in found)
    rows = [[f"{high} > {low}", *(cells.get((high, low, name), "–") for name in scenarios)] for high, low in pairs]
    words = [claim.verdict for claim in found]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return [f"{title}: {counts}.", "", *markdown_lines(Table("", "", ["", *scenarios], rows, 1, [])), ""]


def _cell(claim: Claim, column: str) -> str:
    return f"{claim.verdict}, {signed(column, claim.interval.mean)} ({interval_text(column, claim.interval)})"


def write_between(path: Path, content: str) -> None:
    """Put content between the marks of a document, in place of what stands there, its heads two levels lower."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(_BEGIN) != 1 or text.count(_END) != 1 or text.index(_BEGIN) > text.index(_END):
        raise BadData(
            f"{path}: expected a document with the lines '{_BEGIN}' and '{_END}', the results come between them"
        )
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    lower = re.sub(r"^#", "###", content.strip(), flags=re.MULTILINE)
    write_bytes(path, f"{before}{_BEGIN}\n\n{lower}\n\n{_END}{after}".encode())
