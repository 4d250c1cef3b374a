"""The claims of several studies on one screen, and the parts of a document where they and the tables stand."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from csc.errors import BadData
from csc.report.columns import TITLES
from csc.report.table import escape_markdown, markdown_rows
from csc.storage import write_bytes
from csc.study.claims import Claim, claims, signed, tally
from csc.study.outcome import Outcome
from csc.study.render import markdown

__all__ = ["marked_studies", "results_document", "write_results"]

_VERDICTS = ("holds", "level", "open", "does not hold")  # the worst last


def results_document(outcomes: Sequence[Outcome]) -> str:
    """What came of some studies as Markdown: their claims first, then all tables."""
    return "\n".join(["# Claims", "", *map(_claims, outcomes), *map(markdown, outcomes)])


def marked_studies(path: Path) -> dict[str, list[str]]:
    """The studies whose results a document has, in its order, and the words of the command line that belong to each.

    `<!-- results own-data --set held_out=0: begin -->` has them behind the name of the study.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = {}
    for words in re.findall(r"<!-- results (\S.*): begin -->", text):
        try:
            name, *options = shlex.split(words)
        except ValueError:
            raise BadData(f"{path}: '<!-- results {words}: begin -->': a quote is not closed") from None
        found[name] = options
    return found


def write_results(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put what came of each study between its own marks of a document; the rest of it stays as it is.

    Its tables stand between `<!-- results NAME: begin -->` and `end`, its claims between `<!-- claims NAME: begin -->`
    and `end` if the document has such lines; `marked_studies` says what else the first one may hold. A study without
    any finished cell is refused: it would wipe out what is there, most often because another store was meant.
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
    begins = re.findall(rf"<!-- {re.escape(part)}(?: .*)?: begin -->", text)
    if len(begins) != 1 or text.count(end) != 1 or text.index(begins[0]) > text.index(end):
        raise BadData(f"{path}: expected a document with the lines '{begin}' and '{end}', to write between them")
    before, after = text.partition(begins[0])[0], text.partition(end)[2]
    lower = re.sub(r"^#", "###", content.strip(), flags=re.MULTILINE)
    return f"{before}{begins[0]}\n\n{lower}\n\n{end}{after}"


def _claims(outcome: Outcome) -> str:
    """A row for each claim of a study, a column for each scenario; rows with the same worst verdict stand together."""
    found, column = claims(outcome), outcome.study.columns[0]
    title = f"**{escape_markdown(outcome.title)}**, by {TITLES[column]}"
    if not found:
        return f"{title}: nothing to compare yet.\n"
    scenarios = list(dict.fromkeys(claim.scenario for claim in found))
    by_pair: dict[tuple[str, str], dict[str, Claim]] = {}
    for claim in found:
        by_pair.setdefault((claim.higher, claim.lower), {})[claim.scenario] = claim
    ranked = sorted(by_pair.items(), key=lambda pair: max(_VERDICTS.index(one.verdict) for one in pair[1].values()))
    rows = [
        [escape_markdown(f"{high} > {low}"), *(_cell(of[name], column) if name in of else "–" for name in scenarios)]
        for (high, low), of in ranked
    ]
    counts = ", ".join(_marked(verdict, text) for verdict, text in tally(found).items())
    lines = markdown_rows([["", *map(escape_markdown, scenarios)], *rows], {0})
    return "\n".join([f"{title}: {counts}.", "", *lines, ""])


def _cell(claim: Claim, column: str) -> str:
    """Verdict, difference and, in brackets, its interval and the difference in the paper."""
    ends = [end for end in (claim.interval.low, claim.interval.high) if end is not None]
    inside = ["…".join(signed(column, end).removeprefix("+") for end in ends)] if ends else []
    inside += [f"paper {signed(column, claim.paper)}"] if claim.paper is not None else []
    known = f"{claim.verdict} {signed(column, claim.interval.mean)}" + (f" ({'; '.join(inside)})" if inside else "")
    return _marked(claim.verdict, known)


def _marked(verdict: str, text: str) -> str:
    """Bold for what does not hold, which is what a reader looks for."""
    return f"**{text}**" if verdict == _VERDICTS[-1] else text
