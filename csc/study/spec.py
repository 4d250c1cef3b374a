"""What a study is: rows, scenarios and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgspec

from csc.config.tree import flatten, merged, nested, setting_text
from csc.errors import BadConfig
from csc.report.columns import EXPORTED, SUMMARY
from csc.report.paper import paper_rows
from csc.scenario import Scenario

__all__ = ["Reference", "Row", "Study"]


@dataclass(frozen=True)
class Reference:
    """The paper's numbers for one row on one scenario, by column, and what a reader must know of them."""

    numbers: Mapping[str, float]
    note: str = ""


class Row(msgspec.Struct, frozen=True):
    """One row of a table, as a study's file has it."""

    label: str = ""  # its name in print
    method: str = ""  # learning method
    group: str = ""  # what several rows share, such as the buffer size `20/class`; with the label it is unique
    settings: dict[str, Any] = {}  # overrides that make this row
    by_scenario: dict[str, dict[str, Any]] = {}  # further overrides, by scenario
    paper: dict[str, Any] = {}  # the paper's numbers by scenario, or `buffer`: which row of its tables 1 and 2 has them

    @property
    def name(self) -> str:
        """Label and, in brackets, group."""
        return f"{self.label} ({self.group})" if self.group else self.label

    def reference(self, scenario: str) -> Reference:
        """What the paper has for this row on a scenario; often nothing."""
        if scenario in self.paper:
            return Reference(self.paper[scenario])
        for printed in paper_rows(scenario, self.method):
            if printed.buffer == self.paper.get("buffer"):
                return Reference(printed.numbers, printed.note)
        return Reference({})


class Study(msgspec.Struct, frozen=True):
    """Which runs a study is made of, and what its table shows."""

    name: str  # of the file
    title: str
    rows: tuple[Row, ...]
    scenarios: tuple[str, ...]  # one table each
    seeds: tuple[int, ...] = (0, 1, 2)  # each row is run with each of them
    columns: tuple[str, ...] = SUMMARY  # of `csc.report.columns.COLUMNS`
    settings: dict[str, Any] = {}  # overrides for all rows; a row's own win
    groups: str = ""  # what the rows' groups are, for the head of their column
    order: tuple[tuple[str, ...], ...] = ()  # rows as the paper ranks them by the first column, best first
    overrides: dict[str, Any] = {}  # settings of the command line, which win over all others

    @property
    def exported(self) -> tuple[str, ...]:
        """The columns of files: those of the table, and all of calibration."""
        return tuple(dict.fromkeys((*self.columns, *EXPORTED)))

    def settings_of(self, row: Row, scenario: str, seed: int, *, own: bool = False) -> dict[str, Any]:
        """The overrides that make one cell; with `own` only those keys that the row sets itself."""
        of_row = (row.settings, row.by_scenario.get(scenario, {}))
        whole = dict(flatten(merged(self.settings, *of_row, self.overrides)))
        kept = dict(flatten(merged(*of_row))) if own else whole
        return nested({key: whole[key] for key in kept}) | {"method": row.method, "seed": seed}

    def common_settings(self) -> list[str]:
        """What the command line and then the file set for all rows; where rows differ all the same, every value."""
        own = [dict(flatten(self.settings_of(row, name, 0))) for row in self.rows for name in self.scenarios]
        first = dict(flatten(self.overrides))
        keys = sorted(dict(flatten(merged(self.settings, self.overrides))), key=lambda key: key not in first)
        values = {key: dict.fromkeys(setting_text(settings[key]) for settings in own) for key in keys}
        if "init" in values:  # a file's folder says nothing to those who read the table elsewhere
            values["init"] = dict.fromkeys(PurePath(value).name for value in values["init"])
        return [f"{key}={' or '.join(found)}" for key, found in values.items()]

    def subset(
        self,
        scenarios: Sequence[str] | None = None,
        methods: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> "Study":
        """The part of the study that the command line asks for.

        Rows are kept whose method or label is among `methods`; any scenarios will do, the study's own or others.
        """
        _check_choice({"--scenarios": scenarios, "--methods": methods, "--seeds": seeds}, overrides or {})
        rows = [row for row in self.rows if methods is None or row.method in methods or row.label in methods]
        for name in methods or ():
            if not any(name in (row.method, row.label) for row in self.rows):
                known = ", ".join(dict.fromkeys(row.method for row in self.rows))
                raise BadConfig(f"--methods {name}: study '{self.name}' has no such row; its methods are {known}")
        kept = {name for row in rows for name in (row.label, row.name)}
        order = [tuple(name for name in chain if name in kept) for chain in self.order]
        tables = tuple(dict.fromkeys(Scenario.parse(name).name for name in scenarios or self.scenarios))
        elsewhere = [name for name in tables if name not in self.scenarios]
        return msgspec.structs.replace(
            self,
            title=f"{self.title}; its rows on {', '.join(elsewhere)}" if elsewhere else self.title,
            rows=tuple(rows),
            scenarios=tables,
            seeds=tuple(seeds or self.seeds),
            order=tuple(chain for chain in order if len(chain) > 1),
            overrides=merged(self.overrides, overrides or {}),
        )

    def row_named(self, name: str) -> Row:
        """The row that `order` means by a name: a label, with the group where the label alone is not enough."""
        return next(row for row in self.rows if name in (row.label, row.name))


def _check_choice(chosen: Mapping[str, Sequence[Any] | None], overrides: Mapping[str, Any]) -> None:
    """Refuse to choose nothing, and to choose by a setting."""
    for flag, names in chosen.items():
        if names is not None and not names:
            raise BadConfig(f"{flag}: chooses nothing; name at least one, several with commas between them")
    for key, flag in (("method", "--methods"), ("seed", "--seeds")):
        if key in overrides:
            raise BadConfig(f"--set {key}: a study has several; choose among them with {flag}")
