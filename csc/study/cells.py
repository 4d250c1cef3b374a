"""The cells of a study: one scenario run for each row, scenario and seed, and which of them are finished."""

import functools
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from csc.config import learns_like, methods, resolve
from csc.config.schema import BY_WHOM, Config
from csc.errors import BadConfig
from csc.scenario import Scenario
from csc.study.spec import Row, Study
from csc.tracking.runs import ScenarioRun, curve, finished_runs
from csc.version import code_version

__all__ = ["Cell", "Place", "Result", "cells", "results"]

# A group of settings with the name of a method is read by that method, and by the head that it brought, if any.
_BROUGHT_BY = {"label_graph": "agcn", "attention": "krt", "prompts": "l2p"}


@dataclass(frozen=True)
class Place:
    """A data set that a study may use: where it is, its number of classes, and its fingerprint if it is there yet."""

    data: str
    classes: int
    fingerprint: str = ""


@dataclass(frozen=True)
class Cell:
    """One scenario run that a study asks for.

    Attributes:
        row: of the table.
        scenario: which classes arrive when.
        seed: of all random choices.
        settings: overrides as JSON; what a pipeline is given.
        config: all settings; None if they contradict each other.
        place: of the data; None if it is not known.
        refused: why the cell cannot be run; empty if it can.
    """

    row: Row
    scenario: Scenario
    seed: int
    settings: str
    config: Config | None
    place: Place | None
    refused: str = ""

    @property
    def name(self) -> str:
        """How a person tells it from the others."""
        return f"{self.scenario.name} · {self.row.name} · seed {self.seed}"

    @functools.cached_property
    def key(self) -> str:
        """What tracking knows the run by, see `csc.tracking.runs.run_key`; empty if it cannot be known yet."""
        if self.config is None or self.place is None or not self.place.fingerprint:
            return ""
        return self.config.fingerprint(self.scenario.name, self.place.fingerprint, code_version())

    @property
    def tasks(self) -> int:
        """How many tasks the run has."""
        return len(self.scenario.sizes(self.place.classes)) if self.place else 0


def cells(study: Study, places: Mapping[str, Place]) -> list[Cell]:
    """All cells of a study, in the order of its table.

    Settings that contradict each other only leave out the cells that have them, unless that is all of them.

    Args:
        study: what to run.
        places: of the data sets at hand, by name.
    """
    made = [
        _cell(study, row, Scenario.parse(name), seed, places)
        for name in study.scenarios
        for row in study.rows
        for seed in study.seeds
    ]
    reasons = {cell.refused for cell in made}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise BadConfig(f"study '{study.name}': no cell can be run: {reason}")
    return made


def _cell(study: Study, row: Row, scenario: Scenario, seed: int, places: Mapping[str, Place]) -> Cell:
    overrides = study.settings_of(row, scenario.name, seed)
    place, config, refused = places.get(scenario.dataset), None, ""
    try:
        config = resolve(scenario.dataset, overrides)
    except BadConfig as error:
        refused = str(error)
    if place is None:
        refused = f"no data set '{scenario.dataset}' at hand; name its place with --data"
    else:
        scenario.sizes(place.classes)  # nonsense is refused before anything is run
    return Cell(row, scenario, seed, json.dumps(overrides, sort_keys=True), config, place, refused)


@dataclass(frozen=True)
class Result:
    """What is known of a cell.

    Attributes:
        cell: the run.
        metrics: after the last task, and the summary of all; empty unless it is finished.
        curve: the mAP after each task.
        facts: what the result stands on: `initialisation`, `data` and `code`.
        run_id: of the tracked run.
        missing: `failed` or `not run`; empty if it is finished.
        reason: why it is missing.
    """

    cell: Cell
    metrics: Mapping[str, float]
    curve: tuple[float, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    missing: str = ""
    reason: str = ""

    def fact(self, name: str) -> str:
        """One of the facts; `unknown` if the run does not say."""
        return self.facts.get(name) or "unknown"

    def value(self, column: str) -> float | None:
        """A number of the table; `CR-CP` is a difference of two."""
        first, _, second = column.partition("-")
        if first not in self.metrics or (second and second not in self.metrics):
            return None
        return self.metrics[first] - (self.metrics[second] if second else 0.0)


def results(
    asked: Iterable[Cell],
    *,
    failed: Mapping[str, str] | None = None,
    tried: Container[str] = (),
    any_version: bool = False,
) -> list[Result]:
    """Look up every cell among the finished runs of the tracking server.

    Args:
        asked: cells.
        failed: reasons why cells failed, by key, as far as they are known.
        tried: names of cells that were run; one that is not finished all the same has failed.
        any_version: also take results that other versions of the code have made.
    """
    asked = list(asked)
    known = {name: finished_runs(name) for name in dict.fromkeys(cell.scenario.name for cell in asked)}
    return [_result(cell, known[cell.scenario.name], failed or {}, tried, any_version) for cell in asked]


def _result(
    cell: Cell, runs: list[ScenarioRun], failed: Mapping[str, str], tried: Container[str], any_version: bool
) -> Result:
    if cell.refused:
        return Result(cell, {}, missing="not run", reason=cell.refused)
    found = [run for run in runs if run.tags.get("csc.run_key") == cell.key]
    elsewhere = [] if found else list(_same_but_code(cell, runs))
    for run in [*found, *(elsewhere if any_version else [])]:
        course = curve(run.run_id)
        if len(course) == cell.tasks and "avg_mAP" in run.metrics:
            tags = {"initialisation": "csc.initialisation", "data": "csc.data", "code": "csc.code_version"}
            facts = {name: run.tags.get(tag, "") for name, tag in tags.items()}
            return Result(cell, run.metrics, course, facts, run.run_id)
    if elsewhere and not any_version and cell.key not in failed:
        version = elsewhere[0].tags.get("csc.code_version")
        return Result(cell, {}, missing="not run", reason=f"finished by other code, {version}; --any-version takes it")
    if cell.name in tried:
        return Result(cell, {}, missing="failed", reason=failed.get(cell.key, "see the log of its run"))
    return Result(cell, {}, missing="not run", reason="not started or not finished")


def _same_but_code(cell: Cell, runs: Iterable[ScenarioRun]) -> Iterator[ScenarioRun]:
    """Those of a scenario's runs that are on the same data with the same settings, as far as they matter to the cell.

    A setting that a run does not know came later, and must be at its default.
    """
    if cell.config is None or cell.place is None:
        return
    wanted, default = _decisive(cell.config), _tracked(Config())
    for run in runs:
        same = all(run.params.get(key, default[key]) == value for key, value in wanted.items())
        if same and run.tags.get("csc.data") == cell.place.fingerprint:
            yield run


def _decisive(config: Config) -> dict[str, str]:
    """The settings that decide a result: not who does the work, nor what only another method reads."""
    by_whom = {f"train.{name}" for name in BY_WHOM}
    others = methods().keys() - {learns_like(config.method), _BROUGHT_BY.get(config.head)}
    known = _tracked(config).items()
    return {key: value for key, value in known if key not in by_whom and key.partition(".")[0] not in others}


def _tracked(config: Config) -> dict[str, str]:
    """All settings, as tracking writes them."""
    return {key: str(value) for key, value in config.flat().items()}
