"""What came out of a study: our numbers over seeds, the paper's with them, and what is missing."""

import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from csc.config import preset_for
from csc.report.columns import AT_THRESHOLD, TITLES, format_number
from csc.report.paper import why_incomparable
from csc.report.table import shortened
from csc.report.text import printable
from csc.study.cells import Result
from csc.study.spec import Reference, Row, Study

__all__ = ["Entry", "Number", "Outcome"]

_ROOM, _WIDE_ROOM = 90, 240  # columns for a list of names, and of settings


@dataclass(frozen=True)
class Number:
    """A mean over seeds, with the sample standard deviation where there are several."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Number":
        """Mean and sample deviation of at least one value."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def text(self, column: str, pm: str = "±") -> str:
        """As a table prints it."""
        mean = format_number(column, self.mean)
        return mean if self.std is None else f"{mean}{pm}{format_number(column, self.std)}"


@dataclass(frozen=True)
class Entry:
    """One row of the table of one scenario: the results of all its seeds, and the paper's numbers."""

    row: Row
    scenario: str
    results: tuple[Result, ...]
    reference: Reference

    def number(self, column: str) -> Number | None:
        """Our number, of the seeds that are finished; None if there is none."""
        values = [value for result in self.results if (value := result.value(column)) is not None]
        return Number.of(values) if values else None

    def difference(self, column: str) -> float | None:
        """Ours minus the paper's."""
        ours, paper = self.number(column), self.reference.numbers.get(column)
        return ours.mean - paper if ours is not None and paper is not None else None

    @property
    def missing(self) -> str:
        """In a word why there is no number; empty if there is one."""
        words = {result.missing for result in self.results}
        return "" if "" in words else "failed" if "failed" in words else "not run"

    @property
    def curve(self) -> tuple[float, ...]:
        """The mAP after each task, as a mean over the finished seeds."""
        curves = [result.curve for result in self.results if result.curve]
        return tuple(map(statistics.fmean, zip(*curves, strict=True)))


@dataclass(frozen=True)
class Outcome:
    """A study and what is known of its cells."""

    study: Study
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """The study's, which may be that of a table of the paper; it says if the numbers are of other images."""
        return f"{self.study.title}; NOT on the test images" if self.held_out else self.study.title

    @functools.cached_property
    def held_out(self) -> dict[int, list[Result]]:
        """The cells that are tested on held-out training images, by their setting `held_out`."""
        found: dict[int, list[Result]] = {}
        for result in self.results:
            if result.cell.config is not None and result.cell.config.held_out:
                found.setdefault(result.cell.config.held_out, []).append(result)
        return found

    def reference(self, row: Row, scenario: str) -> Reference:
        """The paper's numbers for a row; none next to numbers of other images than the paper's."""
        left_out = why_incomparable(bool(self.held_out), self._data_notes.get(scenario, ""))
        return Reference({}) if left_out else row.reference(scenario)

    @functools.cached_property
    def _data_notes(self) -> dict[str, str]:
        """How the data of a scenario differ from the benchmark of their name, where they do."""
        sources = {result.cell.scenario.name: result.cell.source for result in self.results}
        return {scenario: source.note for scenario, source in sources.items() if source is not None and source.note}

    def table(self, scenario: str) -> list[Entry]:
        """The rows of a scenario's table, those without any number included."""
        here = [result for result in self.results if result.cell.scenario.name == scenario]
        entries = []
        for row in self.study.rows:
            found = tuple(result for result in here if result.cell.row.name == row.name)
            entries.append(Entry(row, scenario, found, self.reference(row, scenario)))
        return entries

    def paper_columns(self, scenario: str) -> set[str]:
        """The columns for which the paper has a number in this table."""
        return {column for entry in self.table(scenario) for column in entry.reference.numbers}

    @property
    def missing(self) -> list[Result]:
        """The cells without a result."""
        return [result for result in self.results if result.missing]

    @property
    def failed(self) -> list[Result]:
        """The cells that failed."""
        return [result for result in self.results if result.missing == "failed"]

    def notes(self) -> list[str]:
        """What a reader must know of starred numbers of the paper, and of which."""
        rows: dict[str, list[str]] = {}
        for entry in (entry for scenario in self.study.scenarios for entry in self.table(scenario)):
            if note := entry.reference.note:
                rows.setdefault(note, []).append(entry.row.name)
        return [f"{note}: {shortened(list(dict.fromkeys(names)), _ROOM)}" for note, names in rows.items()]

    def gaps(self) -> list[str]:
        """What is missing and why, a line for each reason."""
        reasons: dict[tuple[str, str], list[Result]] = {}
        for result in self.missing:
            reasons.setdefault((result.missing, result.reason), []).append(result)
        return [
            f"{word} ({len(missing)} of {len(self.results)} cells): {self._named(missing)}: {printable(reason)}"
            for (word, reason), missing in reasons.items()
        ]

    def _named(self, missing: list[Result]) -> str:
        """The rows that cells are in; scenarios and seeds only where they are not all concerned."""
        rows = dict.fromkeys(result.cell.row.name for result in missing)
        scenarios = dict.fromkeys(result.cell.scenario.name for result in missing)
        seeds = dict.fromkeys(str(result.cell.seed) for result in missing)
        words = ["all rows" if len(rows) == len(self.study.rows) else shortened(list(rows), _ROOM)]
        words += [] if len(scenarios) == len(self.study.scenarios) else [f"on {', '.join(scenarios)}"]
        words += [] if len(seeds) == len(self.study.seeds) else [f"seed {', '.join(seeds)}"]
        return ", ".join(words)

    def thresholds(self) -> Iterator[str]:
        """The rows of each threshold, where those of a scenario differ and a column depends on it."""
        shown = [title for name, title in TITLES.items() if name in self.study.columns and name in AT_THRESHOLD]
        lines: dict[str, list[str]] = {}
        for scenario in self.study.scenarios if shown else ():
            by_value: dict[float, list[Result]] = {}
            for result in self.results:
                if result.cell.config is not None and result.cell.scenario.name == scenario:
                    by_value.setdefault(result.cell.config.threshold, []).append(result)
            values = [f"{value:g} ({_rows(those, _WIDE_ROOM)})" for value, those in by_value.items()]
            if len(values) > 1:
                lines.setdefault(", ".join(values), []).append(scenario)
        for message, scenarios in lines.items():
            where = "" if len(scenarios) == len(self.study.scenarios) else f" on {', '.join(scenarios)}"
            yield f"the threshold of {', '.join(shown)} differs{where}: {message}"

    def presets(self) -> Iterator[str]:
        """The data sets whose settings are those of another one."""
        for dataset in dict.fromkeys(result.cell.scenario.dataset for result in self.results):
            if (preset := preset_for(dataset)) != dataset:
                yield f"data set '{dataset}' has no preset of its own: settings are those of '{preset}'"

    def provenance(self) -> list[str]:
        """What the results were made from; where cells differ in it, which cells."""
        finished = [result for result in self.results if not result.missing]
        data = dict.fromkeys(f"{r.cell.scenario.dataset} {r.provenance['data'][:12]}" for r in finished)
        lines = [f"seeds {', '.join(map(str, self.study.seeds))}" + (f" · data {', '.join(data)}" if data else "")]
        lines += self._tested()
        lines += map(self._data_note, dict.fromkeys(self._data_notes.values()))
        if settings := self.study.common_settings():
            lines.append(f"settings {shortened(settings, _WIDE_ROOM)}")
        for name in ("initialisation", "code"):
            values: dict[str, list[Result]] = {}
            for result in finished:
                values.setdefault(printable(result.provenance[name]), []).append(result)
            if len(values) == 1:
                lines.append(f"{name} {next(iter(values))}")
            else:
                lines += [f"{name} differs: {value} ({_rows(those)})" for value, those in values.items()]
        return lines

    def _data_note(self, note: str) -> str:
        """How data differ from the benchmark of their name, and what that means for the paper's numbers."""
        scenarios = [scenario for scenario, said in self._data_notes.items() if said == note]
        if any(map(self.paper_columns, scenarios)):
            return f"{note}; the paper's numbers are of the whole"
        printed = any(row.reference(scenario).numbers for row in self.study.rows for scenario in scenarios)
        return f"{note}; the paper's numbers are left out" if printed else note

    def _tested(self) -> Iterator[str]:
        """The warning that a single run has, where cells are not tested on the test images."""
        for every, cells in self.held_out.items():
            whose = "" if len(cells) == len(self.results) else f" ({_rows(cells)})"
            yield f"NOT the test images: tested on 1 of {every} training images{whose}"


def _rows(results: Iterable[Result], room: int = _ROOM) -> str:
    return shortened(list(dict.fromkeys(result.cell.row.name for result in results)), room)
