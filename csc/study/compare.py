"""Runs of the tracking store next to each other, whatever study or command made them.

Runs that differ in their seed alone are one row. Every row is compared with the first, paired over the seeds that both
have and over resampled test images; a single run is paired with a single run, whatever their seeds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from csc.artifacts import RunResults
from csc.config.schema import EXECUTION_ONLY
from csc.errors import BadData
from csc.report import figures
from csc.report.columns import COMPARED, ECE_OLD_NEW, calibration, format_number, titles
from csc.report.layout import figure, html_page
from csc.report.svg import escape
from csc.study.claims import interval_cells, paired, resampled
from csc.study.figure import draw_intervals
from csc.study.intervals import Interval
from csc.study.outcome import Number
from csc.study.page import confidence_part, remark_list, titled_table
from csc.study.render import Table, as_text
from csc.tracking.tracked_run import TrackedRun

__all__ = ["Group", "compare", "comparison_page", "comparison_text"]

_NO_CURVES = '<p class="note">No row has finished every task, so there is no curve.</p>'


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    runs: dict[int, tuple[str, RunResults]]  # by seed, with the id of the tracked run

    @property
    def any_run(self) -> RunResults:
        """One of its runs, for what all of them have in common."""
        return next(iter(self.runs.values()))[1]

    def has_room(self, seed: int, run_id: str) -> bool:
        """Whether it has no other run of this seed."""
        return seed not in self.runs or self.runs[seed][0] == run_id

    def number(self, column: str) -> Number:
        """The mean over seeds of a number after the last task, or of the summary."""
        return Number.of([_value(run, column) for _, run in self.runs.values()])

    def calibration(self, column: str) -> Number | None:
        """The mean over seeds of a calibration error of old or new classes; none if no run has it."""
        found = [calibration(run.last) for _, run in self.runs.values()]
        values = [numbers[column] for numbers in found if column in numbers]
        return Number.of(values) if values else None

    def minus(self, other: "Group") -> Interval | None:
        """The difference in last mAP; None if nothing can be paired."""
        seeds = [seed for seed in self.runs if seed in other.runs]
        pairs = [(self.runs[seed], other.runs[seed]) for seed in seeds]
        if not pairs and len(self.runs) == len(other.runs) == 1:
            pairs = list(zip(self.runs.values(), other.runs.values(), strict=True))
        if not pairs:
            return None
        values = [(_value(one, "last_mAP"), _value(two, "last_mAP")) for (_, one), (_, two) in pairs]
        resampled_pairs = [(resampled(a, one.last.task), resampled(b, two.last.task)) for (a, one), (b, two) in pairs]
        return paired(values, resampled_pairs)


def _value(run: RunResults, column: str) -> float:
    return float(run.summary[column] if column in run.summary else run.last.metrics[column])


def compare(tracked: Sequence[TrackedRun]) -> list[Group]:
    """Put runs into rows, in the order given; a run without a finished task is refused."""
    rows: list[tuple[object, Group]] = []  # each with what its runs share
    for found in tracked:
        if found.registered_task is None:
            raise BadData(f"run {found.name}: no task of it is finished yet, nothing to compare")
        run = found.registered_task.run
        settings = {key: value for key, value in found.settings.items() if key not in ("seed", *EXECUTION_ONLY)}
        shared = (run.scenario, run.data_fingerprint, run.code_version, settings)
        # Another run with the same seed extends another model.
        fitting = (row for key, row in rows if key == shared and row.has_room(run.seed, found.run_id))
        group = next(fitting, None)
        if group is None:
            group = Group(found.name.replace(f" · seed {run.seed}", "").replace(f" seed {run.seed}", ""), {})
            rows.append((shared, group))
        group.runs[run.seed] = (found.run_id, run)
    return _with_distinct_names([group for _, group in rows])


def _with_distinct_names(groups: list[Group]) -> list[Group]:
    """Rows by what they do not all share; those that would still have the same name get the ids of their runs."""
    words = [group.name.split(" · ") for group in groups]
    shared = set.intersection(*map(set, words))
    names = [" · ".join(word for word in of if word not in shared) or " · ".join(of) for of in words]
    ids = [next(iter(group.runs.values()))[0][:8] for group in groups]
    return [
        Group(f"{name} ({run_id})" if names.count(name) > 1 else name, group.runs)
        for name, run_id, group in zip(names, ids, groups, strict=True)
    ]


def _tables(groups: list[Group]) -> list[Table]:
    numbers = {column: [group.number(column) for group in groups] for column in COMPARED}
    if not any(number.mean for number in numbers["CF1_own"]):
        del numbers["CF1_own"]  # models of a version that had no thresholds
    rows = [
        [group.name, str(len(group.runs)), *(values[index].text(column) for column, values in numbers.items())]
        for index, group in enumerate(groups)
    ]
    head = ["", "seeds", *titles(numbers)]
    note = "After the last task; mean over seeds. CF1 own: at thresholds that the model has from its training images."
    tables = [Table("Results", note, head, rows, 1, [False] * len(rows)), *_calibration(groups)]
    first, *others = groups
    against = [_difference(group, first) for group in others]
    if against:
        head = [f"minus {first.name}", "difference", "95 % interval", "seeds", "images", "last mAP is"]
        note = "Paired over seeds and over resampled test images; level: zero is in the interval."
        tables.append(Table("Differences in last mAP", note, head, against, 1, [False] * len(against)))
    return tables


def _calibration(groups: list[Group]) -> list[Table]:
    """The calibration errors of old and new classes, before and after scaling; nothing if no run has them."""
    numbers = {column: [group.calibration(column) for group in groups] for column in ECE_OLD_NEW}
    shown = {column: values for column, values in numbers.items() if any(values)}
    rows = [
        [group.name, *(number.text(column) if (number := values[index]) else "–" for column, values in shown.items())]
        for index, group in enumerate(groups)
    ]
    note = "Of the classes before the last task and of its own; /T: logits divided by the model's temperature T."
    return [Table("Calibration", note, ["", *titles(shown)], rows, 1, [False] * len(rows))] if shown else []


def _paired(group: Group, first: Group) -> Interval | None:
    """The difference of two rows; none if they were tested on other images or nothing can be paired."""
    one, other = ((run.scenario, run.data_fingerprint, run.held_out) for run in (group.any_run, first.any_run))
    return group.minus(first) if one == other else None


def _difference(group: Group, first: Group) -> list[str]:
    found = _paired(group, first)
    if found is None:
        return [group.name, "–", "–", "–", "–", "not comparable"]
    verdict = {"above": "higher", "below": "lower"}.get(found.verdict, found.verdict)
    return [group.name, *interval_cells("last_mAP", found), verdict]


def _remarks(groups: list[Group]) -> list[str]:
    """What a reader must know to take the numbers for what they are."""
    runs = [run for group in groups for _, run in group.runs.values()]
    lines = ["one seed: the interval is of these two models on other images, not of the methods"]
    lines = lines if any(len(group.runs) == 1 for group in groups) else []
    for name, values in {
        "scenario": [run.scenario for run in runs],
        "data": [run.data_fingerprint[:12] for run in runs],
        "initialisation": [run.initialisation for run in runs],
        "code": [run.code_version for run in runs],
    }.items():
        known = list(dict.fromkeys(values))
        lines.append(f"{name} {known[0]}" if len(known) == 1 else f"{name} differs: {', '.join(known)}")
    if any(run.held_out for run in runs):
        lines.append("NOT the test images: some runs are tested on held-out training images")
    return lines


def comparison_text(groups: list[Group]) -> str:
    """The comparison for a terminal."""
    return as_text("Comparison", _tables(groups), _remarks(groups))


def comparison_page(groups: list[Group]) -> str:
    """The comparison as a page, with the course of every row and the AP of each class."""
    first, *others = groups
    body = [titled_table(table) for table in _tables(groups)]
    rows = [(f"{group.name} − {first.name}", found) for group in others if (found := _paired(group, first))]
    if rows:
        body.append(figure(lambda width: draw_intervals(rows, width)))
    for scenario in dict.fromkeys(group.any_run.scenario for group in groups):
        body += _course([group for group in groups if group.any_run.scenario == scenario], scenario)
    return html_page("Comparison of runs", "\n".join([*body, remark_list(_remarks(groups))]))


def _course(groups: list[Group], scenario: str) -> list[str]:
    """The mAP after each task, and the AP of each class after the last, of the rows of one scenario."""
    longest = max((run for group in groups for _, run in group.runs.values()), key=lambda run: len(run.tasks))
    seen = [len(task.seen) for task in longest.tasks]
    lines = {}
    for group in groups:
        curves = [[task.metrics.mAP for task in run.tasks] for _, run in group.runs.values()]
        if all(len(curve) == len(seen) for curve in curves):
            lines[group.name] = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    rows = []
    for name in longest.last.seen:
        found = [[run.last.metrics.AP.get(name) for _, run in group.runs.values()] for group in groups]
        known = [[value for value in values if value is not None] for values in found]
        rows.append([name, *(format_number("AP", statistics.fmean(values)) if values else "–" for values in known)])
    table = Table(f"{scenario}, AP of each class", "After the last task.", ["", *(g.name for g in groups)], rows, 1, [])
    models = {group.name: group.any_run.last.metrics for group in groups}
    return [
        f"<h2>{escape(scenario)}</h2>",
        "<p>The mAP after each task, as a mean over seeds.</p>",
        figure(lambda width: figures.curves(lines, seen, width)) if lines else _NO_CURVES,
        confidence_part(models),
        titled_table(table),
    ]
