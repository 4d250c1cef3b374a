"""The cells of a study: one scenario run for each row, scenario and seed, and which of them are finished."""

import functools
import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from csc.config import differences, resolve
from csc.config.layers import method_class
from csc.config.schema import Config
from csc.config.tree import flatten, nested
from csc.data.dataset import Dataset
from csc.data.published import benchmark_note
from csc.errors import BadConfig
from csc.scenario import Scenario
from csc.storage import sha256_file
from csc.study.spec import Row, Study
from csc.tracking.queries import ScenarioRun, finished_runs, map_after_tasks
from csc.version import code_version

__all__ = ["Cell", "DataSource", "Result", "cells", "distinct", "results"]


@dataclass(frozen=True)
class DataSource:
    """A data set that a study may use: its uri, its number of classes, and its fingerprint if it is there yet."""

    uri: str
    classes: int
    fingerprint: str = ""
    note: str = ""  # how it differs from the benchmark of its name; empty if it does not

    @classmethod
    def open(cls, uri: str) -> "DataSource":
        """A data set that is there, with what it says of itself."""
        dataset = Dataset.open(uri)
        return cls(uri, len(dataset.classes), dataset.fingerprint, benchmark_note(dataset))


@dataclass(frozen=True)
class Cell:
    """One scenario run that a study asks for."""

    row: Row
    scenario: Scenario
    seed: int  # of the table; a method without randomness runs with the first seed
    settings: str  # overrides as JSON; what a pipeline is given
    config: Config | None  # all settings; None if they contradict each other
    source: DataSource | None  # the data; None if it is not known
    refused: str = ""  # why the cell cannot be run; empty if it can

    @property
    def name(self) -> str:
        """How a person tells it from the others."""
        return f"{self.scenario.name} · {self.row.name} · seed {self.seed}"

    @functools.cached_property
    def key(self) -> str:
        """The key of the run, see `Config.run_key`; empty if it cannot be known yet."""
        if self.config is None or self.source is None or not self.source.fingerprint:
            return ""
        return self.config.run_key(self.scenario.name, self.source.fingerprint, code_version())

    @functools.cached_property
    def run(self) -> tuple[str, str] | None:
        """What identifies the run within the study: cells with the same value share it. None if there can be none."""
        return None if self.config is None else (self.scenario.name, self.config.fingerprint())

    def describes(self, run: ScenarioRun) -> bool:
        """Whether a run, of any version of the code, has the cell's data and settings.

        Settings that the version did not know yet have to be the defaults of today.
        """
        if self.config is None or self.source is None or run.tags.get("csc.data") != self.source.fingerprint:
            return False
        own = ("method", "head", *method_class(self.config.method).required_settings)  # defaults need them
        chosen = nested({key: value for key, value in self.config.flat().items() if key in own})
        known = resolve(self.scenario.dataset, chosen).flat() | run.params
        wanted = {key: value for key, value in self.config.decisive().items() if key != "init"}
        if any(str(known.get(key)) != str(value) for key, value in wanted.items()):
            return False
        return _same_weights(self.config.init, str(known["init"]), run.tags.get("csc.initialisation", ""))

    @property
    def variants(self) -> int:
        """How many variants of each image the run needs as feature maps; 0 if it works on images."""
        return self.config.features.views if self.config else 0

    @property
    def maps(self) -> tuple[Any, ...]:
        """What decides the feature maps that the run needs; empty if it works on images.

        `csc.data.feature_maps.features_key` names the maps themselves, but has to read the weights.
        """
        config = self.config
        if config is None or not self.variants:
            return ()
        weights = config.init, config.seed if config.init == "scratch" else None
        backbone = config.backbone.name, config.backbone.output_stride
        return self.scenario.dataset, *backbone, *weights, config.input.size, config.input.decode

    @property
    def tasks(self) -> int:
        """How many tasks the run has."""
        return len(self.scenario.sizes(self.source.classes)) if self.source else 0


def _same_weights(asked: str, used: str, recorded: str) -> bool:
    """Whether a run began with the weights that a cell wants, in whatever folder their file was.

    `asked` and `used` are the settings `init`; `recorded` has the file's name and the beginning of its digest.
    """
    file = re.match(r"file (.+), sha256 ([0-9a-f]+)", recorded)
    if file is None or asked in ("hub", "scratch"):
        return asked == used
    path = Path(asked).expanduser()
    return file[1] == path.name and (not path.is_file() or _digest(path).startswith(file[2]))


_digest = functools.cache(sha256_file)


def cells(study: Study, sources: Mapping[str, DataSource]) -> list[Cell]:
    """All cells of a study, in the order of its table; `sources` are the data sets at hand, by name.

    Settings that contradict each other only leave out the cells that have them, unless that is all of them.
    """
    made = [
        _cell(study, row, Scenario.parse(name), seed, sources)
        for name in study.scenarios
        for row in study.rows
        for seed in study.seeds
    ]
    _check_read(study, made)
    reasons = {cell.refused for cell in made}
    if len(reasons) == 1 and (reason := reasons.pop()):
        raise BadConfig(f"study '{study.name}': no cell can be run: {reason}")
    return made


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """The cells that can be run, without those that ask for the same run as another, in the order in which to run them.

    First seeds come first. Before all come the cells with most variants of an image: their maps serve the others too.
    """
    unique: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        if cell.run is not None and not cell.refused:
            unique.setdefault(cell.run, cell)
    return sorted(unique.values(), key=lambda cell: (-cell.variants, cell.seed))


def _check_read(study: Study, made: Iterable[Cell]) -> None:
    """Refuse what the command line sets for all rows and none reads."""
    read = {key for cell in made if cell.config for key in cell.config.flat()}
    for key, _ in flatten(study.overrides):
        if read and key not in read:
            raise BadConfig(f"{key}: no row of study '{study.name}' reads such a setting")


def _cell(study: Study, row: Row, scenario: Scenario, seed: int, sources: Mapping[str, DataSource]) -> Cell:
    """One cell; where nothing is random, it asks for the run of the first seed."""
    overrides = study.settings_of(row, scenario.name, seed)
    source, config, refused = sources.get(scenario.dataset), None, ""
    try:
        # A row must read all that it sets itself; of what is set for all rows, it reads what its method does.
        config = resolve(scenario.dataset, study.settings_of(row, scenario.name, seed, own=True), shared=overrides)
    except BadConfig as error:
        refused = str(error)
    if config and seed != study.seeds[0] and not method_class(config.method).is_random(config):
        return replace(_cell(study, row, scenario, study.seeds[0], sources), seed=seed)
    if source is None:
        refused = f"no data set '{scenario.dataset}' at hand; give its uri with --data"
    else:
        scenario.sizes(source.classes)  # bad input is refused before anything is run
    settings = differences(scenario.dataset, config) if config else json.dumps(overrides, sort_keys=True)
    return Cell(row, scenario, seed, settings, config, source, refused)


@dataclass(frozen=True)
class Result:
    """What is known of a cell."""

    cell: Cell
    metrics: Mapping[str, float]  # after the last task, and the summary of all; empty unless it is finished
    curve: tuple[float, ...] = ()  # the mAP after each task
    provenance: Mapping[str, str] = field(default_factory=dict)  # `initialisation`, `data` and `code`, if finished
    run_id: str = ""  # of the tracked run
    missing: str = ""  # `failed` or `not run`; empty if it is finished
    reason: str = ""  # why it is missing

    def value(self, column: str) -> float | None:
        """A number of the table, if there is one; `CR-CP` is a difference of two."""
        if "_old" in column and self.cell.tasks == 1:  # metrics have 0 for classes that do not exist
            return None
        first, _, second = column.partition("-")
        if first not in self.metrics or (second and second not in self.metrics):
            return None
        return self.metrics[first] - (self.metrics[second] if second else 0.0)


def results(
    asked: Iterable[Cell],
    *,
    failed: Mapping[str, str] = {},
    tried: Container[str] = (),
    any_code: bool = False,
) -> list[Result]:
    """Look up every cell among the finished runs of the tracking server.

    Args:
        asked: cells.
        failed: reasons why cells failed, by key, as far as they are known.
        tried: names of cells that were run; one that is still not finished has failed.
        any_code: runs of other versions of the code will do where there is none of this one.
    """
    runs_of = functools.cache(finished_runs)
    return [_result(cell, runs_of(cell.scenario.name), failed, tried, any_code) for cell in asked]


def _result(
    cell: Cell, runs: list[ScenarioRun], failed: Mapping[str, str], tried: Container[str], any_code: bool
) -> Result:
    if cell.refused:
        return Result(cell, {}, missing="not run", reason=cell.refused)
    same = [run for run in runs if run.tags.get("csc.run_key") == cell.key]
    alike = [run for run in runs if cell.describes(run)] if any_code else []
    for run in (*same, *alike):
        values = map_after_tasks(run.run_id)
        if len(values) == cell.tasks and "avg_mAP" in run.metrics:
            tags = {"initialisation": "csc.initialisation", "data": "csc.data", "code": "csc.code_version"}
            provenance = {name: run.tags.get(tag) or "unknown" for name, tag in tags.items()}
            return Result(cell, run.metrics, values, provenance, run.run_id)
    if cell.name in tried:
        return Result(cell, {}, missing="failed", reason=failed.get(cell.key, "see the log of its run"))
    return Result(cell, {}, missing="not run", reason="not started or not finished")
