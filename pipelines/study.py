"""The pipeline of a study: the cells of each scenario side by side, each an ordinary scenario run, then the tables.

A loop of kfp runs one sub-pipeline, so there is one loop for each scenario (and for each form its pipeline takes: with
an embed step, on several nodes). Maps of a frozen backbone are made once before the loops that need them, because cells
that begin together would all make them. The tables come last and always: a failed cell loses no other.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from csc.components.collect.component import collect
from csc.components.embed.component import embed
from csc.components.ingest.component import ingest
from csc.pipelines.package import STEPS, check_steps, write_package
from csc.pipelines.profile import Profile, apply
from csc.pipelines.scenario import LOCAL, build_pipeline
from csc.scenario import Scenario
from csc.steps.collect import order_for
from csc.study.cells import Cell, Place
from csc.study.spec import Study

__all__ = ["Loop", "build_study", "compile_study", "loops", "parts", "study_name"]


class Loop(NamedTuple):
    """Cells that one sub-pipeline can run: of one scenario, and alike in the shape of their pipelines."""

    scenario: Scenario
    place: Place
    cells: tuple[Cell, ...]

    @property
    def items(self) -> list[str]:
        """What the loop runs over: the settings of each run, first seeds first."""
        return [cell.settings for cell in self.runs]

    @property
    def runs(self) -> list[Cell]:
        """The cells without those that ask for the same run as another."""
        unique: dict[str, Cell] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.seed):
            unique.setdefault(cell.config.to_json(), cell)
        return list(unique.values())


def loops(cells: Iterable[Cell]) -> list[Loop]:
    """Put the cells that can be run into loops; the others are left out."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if not cell.refused:
            shape = cell.config.features.views > 0, cell.config.train.nodes > 1
            groups.setdefault((cell.scenario, *shape), []).append(cell)
    return [Loop(scenario, group[0].place, tuple(group)) for (scenario, *_), group in groups.items()]


def parts(cells: Iterable[Cell], most: int = STEPS) -> list[list[Cell]]:
    """Cut a study into pipelines that a cluster can hold, each with at most so many steps; equal runs come once.

    A run is never cut: one with more steps has a pipeline of its own, and is refused if no cluster could hold that.
    """
    cut: list[list[Cell]] = [[]]
    steps = 0
    for cell in sorted((cell for turn in loops(cells) for cell in turn.runs), key=lambda cell: cell.seed):
        own = _steps(cell)
        check_steps(cell.scenario.name, own)
        if cut[-1] and steps + own > most:
            cut.append([])
            steps = 0
        cut[-1].append(cell)
        steps += own
    return cut


def _steps(cell: Cell) -> int:
    """Of a run, with those that make its maps before it."""
    return 5 * cell.tasks + (5 if cell.config.features.views else 2)


def study_name(study: Study) -> str:
    """Stable per study: the cluster's cache is kept under this name."""
    return "csc-study-" + re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-")


def build_study(
    study: Study,
    cells: Iterable[Cell],
    places: Mapping[str, Place],
    profile: Profile = LOCAL,
    parallelism: int | None = None,
) -> BaseComponent:
    """Make the pipeline of a study.

    Args:
        study: of which the tables are made.
        cells: those to run.
        places: of the data sets, by name.
        profile: of the place where it will run.
        parallelism: how many cells of a scenario may run at the same time; the profile's if not given.
    """
    turns = loops(cells)
    order = order_for(study, places, {cell.name for turn in turns for cell in turn.cells})
    alike = [build_pipeline(turn.scenario, turn.place.classes, json.loads(turn.items[0]), profile) for turn in turns]
    at_once = parallelism or profile.study.parallelism

    @dsl.pipeline(name=study_name(study), description=study.title)
    def study_pipeline(checkpoints: str = profile.storage.checkpoints, gpus: str = str(max(profile.gpu.count, 1))):
        tables = apply(profile, collect(order=order))
        tables.set_caching_options(False)
        with dsl.ExitHandler(tables, name="cells"):
            maps = _maps_made(turns, profile)
            for turn, pipeline in zip(turns, alike, strict=True):
                with dsl.ParallelFor(turn.items, name=turn.scenario.name, parallelism=at_once) as config:
                    run = pipeline(data=turn.place.data, config=config, checkpoints=checkpoints, gpus=gpus)
                    run.after(*(maps[key] for key in dict.fromkeys(map(_maps, turn.cells)) if key))

    return study_pipeline


def _maps_made(turns: Iterable[Loop], profile: Profile) -> dict[tuple[Any, ...], dsl.PipelineTask]:
    """One embed step for all cells that share their maps; the one that asks for most views stands for the others."""
    wanted: dict[tuple[Any, ...], Cell] = {}
    for cell in (cell for turn in turns for cell in turn.cells):
        if key := _maps(cell):
            wanted[key] = max(wanted.get(key, cell), cell, key=lambda cell: cell.config.features.views)
    made = {}
    for key, cell in wanted.items():
        opened = apply(profile, ingest(scenario=cell.scenario.name, data=cell.place.data))
        opened.set_caching_options(False)
        step = embed(origin=opened.outputs["Output"], scenario=cell.scenario.name, config=cell.settings)
        made[key] = apply(profile, step, heavy=True, gpus=1).set_caching_options(False)
    return made


def _maps(cell: Cell) -> tuple[Any, ...]:
    """What decides the maps that a cell needs, see `csc.data.features.features_key`; empty if it works on images."""
    config = cell.config
    if not config.features.views:
        return ()
    weights = config.init, config.seed if config.init == "scratch" else None
    backbone = config.backbone.name, config.backbone.output_stride
    return cell.scenario.dataset, *backbone, *weights, config.input.size, config.input.decode


def compile_study(
    study: Study,
    cells: Iterable[Cell],
    places: Mapping[str, Place],
    out: Path,
    profile: Profile = LOCAL,
    parallelism: int | None = None,
    on_cluster: bool = False,
) -> None:
    """Write the compiled pipeline of a study as YAML; see `build_study` and `write_package`."""
    write_package(build_study(study, cells, places, profile, parallelism), out, on_cluster=on_cluster)
