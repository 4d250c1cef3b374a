"""The claims of a study: which row is above which, and whether the results support it."""

import functools
import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from csc.artifacts import SCORES
from csc.data.scores import Scores
from csc.report.columns import TITLES, format_number
from csc.study.cells import Result
from csc.study.intervals import Interval, ResampledValues, difference, resampled_map
from csc.study.outcome import Entry, Outcome
from csc.tracking.files import fetch_files

__all__ = ["Claim", "Resampled", "claims", "explanation", "interval_cells", "paired", "resampled", "signed", "tally"]

_RESAMPLED = "last_mAP"  # the column that is computed again on resampled images
_NOTHING = 1e-4  # a difference below it is one of rounding


@dataclass(frozen=True)
class Claim:
    """That one row of a table is above another by the study's first column."""

    scenario: str
    higher: str
    lower: str
    interval: Interval  # of the difference
    paper: float | None  # the difference in the paper

    @property
    def verdict(self) -> str:
        """In a word what came out; one seed says nothing of how the methods do with others."""
        words = {"above": "holds", "level": "level", "below": "does not hold", "open": "open"}
        return words[self.interval.verdict] if self.interval.seeds > 1 else "open"


@dataclass(frozen=True)
class Resampled:
    """The mAP of a run on resampled test images; only those of the same test images can be paired."""

    draws: ResampledValues
    images: int
    test_images: str  # digest of what they show


def claims(outcome: Outcome) -> list[Claim]:
    """What the study's order claims of rows that stand next to each other in it, as far as both are finished."""
    study, column, found = outcome.study, outcome.study.columns[0], []
    for scenario in study.scenarios:
        entries = {entry.row.name: entry for entry in outcome.table(scenario) if entry.number(column)}
        ranked = [[name for name in chain if study.row_named(name).name in entries] for chain in study.order]
        for higher, lower in dict.fromkeys(pair for chain in ranked for pair in pairwise(chain)):
            first, second = (entries[study.row_named(name).name] for name in (higher, lower))
            if interval := _interval(first, second, column):
                found.append(Claim(scenario, higher, lower, interval, _paper(first, second, column)))
    return found


def _interval(first: Entry, second: Entry, column: str) -> Interval | None:
    """The interval of the difference of two rows; none if they have no seed in common."""
    others = {result.cell.seed: result for result in second.results if not result.missing}
    pairs = [(one, others[one.cell.seed]) for one in first.results if not one.missing and one.cell.seed in others]
    values = [(one.value(column), other.value(column)) for one, other in pairs]
    known = [(one, other) for one, other in values if one is not None and other is not None]
    if not known:
        return None
    resampled_pairs = [(_resampled(one), _resampled(other)) for one, other in pairs] if column == _RESAMPLED else []
    return paired(known, resampled_pairs)


def paired(
    values: list[tuple[float, float]], resampled_pairs: list[tuple[Resampled | None, Resampled | None]]
) -> Interval:
    """The difference of paired numbers, with what resampled images say if all were tested on the same ones."""
    known = [(one, other) for one, other in resampled_pairs if one is not None and other is not None]
    tests = {each.test_images for pair in known for each in pair}
    if len(known) < len(values) or len(tests) != 1:
        return difference(values)
    return difference(values, [(one.draws, other.draws) for one, other in known], known[0][0].images)


def _resampled(result: Result) -> Resampled | None:
    return resampled(result.run_id, result.cell.tasks) if result.run_id else None


@functools.cache
def resampled(run_id: str, task: int) -> Resampled | None:
    """The mAP of a scenario run after a task, on resampled test images; none if its scores were not kept."""
    with tempfile.TemporaryDirectory(prefix="csc-scores-") as folder:
        files = fetch_files(run_id, SCORES, Path(folder), task)
        if task not in files:
            return None
        scores = Scores.read(files[task])
    digest = hashlib.sha256(repr(scores.classes).encode() + scores.targets.tobytes()).hexdigest()
    return Resampled(resampled_map(scores), len(scores.targets), digest)


def _paper(first: Entry, second: Entry, column: str) -> float | None:
    one, other = (entry.reference.numbers.get(column) for entry in (first, second))
    return None if one is None or other is None else one - other


def signed(column: str, value: float) -> str:
    """A difference as tables print it, with more digits where it would round to zero and is not.

    >>> signed("last_mAP", -1.26), signed("last_mAP", -0.04), signed("last_mAP", 0.003), signed("H", 0.004)
    ('−1.3', '−0.04', '+0.003', '+0.004')
    """
    size = format_number(column, abs(value))
    digits = len(size.partition(".")[2])
    while float(size) == 0 and abs(value) >= _NOTHING:
        digits += 1
        size = f"{abs(value):.{digits}f}"
    return ("" if float(size) == 0 else "−" if value < 0 else "+") + size


def interval_cells(column: str, interval: Interval) -> list[str]:
    """A difference, the ends of its interval, and of how many seeds and images they are."""
    ends = [signed(column, end) for end in (interval.low, interval.high) if end is not None]
    images = f"{interval.images:,}" if interval.images else "–"
    return [signed(column, interval.mean), " to ".join(ends) or "–", str(interval.seeds), images]


def tally(found: Sequence[Claim]) -> dict[str, str]:
    """How many claims have each verdict, in words, by the verdict; what no claim has is left out."""
    plural = {"holds": "hold", "level": "level", "open": "open", "does not hold": "do not hold"}
    counts = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in plural}
    return {name: f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count}


def explanation(found: list[Claim], column: str) -> list[str]:
    """What the verdicts mean, and how many there are of each."""
    if not found:
        return []
    counts = tally(found)
    said = f"claims by {TITLES[column]}: {', '.join(counts.values())}"
    return [
        f"{said}; one holds if its whole interval is above zero, level if zero is in it",
        "intervals are paired over seeds, and over test images by bootstrap where their scores are kept",
        *(["open: one seed says nothing of how the methods do with others"] if "open" in counts else []),
    ]
