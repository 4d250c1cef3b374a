"""The pipeline of a study: the cells of each scenario side by side, each an ordinary scenario run, then the tables.

A loop of kfp runs one sub-pipeline, so there is one loop for each scenario (and for each form its pipeline takes: with
an embed step, on several nodes). Maps of a frozen backbone are made once before the loops that need them, because cells
that begin together would all make them. The tables come last and always: a failed cell loses no other.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from csc.artifacts import TableRequest
from csc.components.collect.component import collect
from csc.components.embed.component import embed
from csc.pipelines.package import STEPS, checked_steps
from csc.pipelines.pods import apply
from csc.pipelines.profile import Profile
from csc.pipelines.scenario import LOCAL, build_pipeline, open_data
from csc.scenario import Scenario
from csc.study.cells import Cell, DataSource, distinct
from csc.study.cells import cells as cells_of
from csc.study.spec import Study

__all__ = ["Loop", "build_study", "loops", "split_into_pipelines", "study_name", "table_request"]


class Loop(NamedTuple):
    """Cells that one sub-pipeline can run: of one scenario, and alike in the shape of their pipelines."""

    scenario: Scenario
    source: DataSource
    cells: tuple[Cell, ...]

    @property
    def items(self) -> list[str]:
        """What the loop runs over: the settings of each run, first seeds first."""
        return [cell.settings for cell in distinct(self.cells)]


def loops(cells: Iterable[Cell]) -> list[Loop]:
    """Put the cells that can be run into loops; the others are left out."""
    groups: dict[tuple[Scenario, DataSource, bool, bool], list[Cell]] = {}
    for cell in cells:
        if not cell.refused and cell.config is not None and cell.source is not None:
            shape = cell.config.features.views > 0, cell.config.train.nodes > 1
            groups.setdefault((cell.scenario, cell.source, *shape), []).append(cell)
    return [Loop(scenario, source, tuple(group)) for (scenario, source, *_), group in groups.items()]


def split_into_pipelines(cells: Iterable[Cell], most: int = STEPS) -> list[list[Cell]]:
    """Cut a study into pipelines that a cluster can hold, each with at most so many steps; equal runs come once.

    A run is never cut: one with more steps has a pipeline of its own, and is refused if no cluster could hold that.
    """
    cut: list[list[Cell]] = [[]]
    steps = 0
    for cell in sorted((cell for loop in loops(cells) for cell in distinct(loop.cells)), key=lambda cell: cell.seed):
        # Maps are made before the run, by two steps.
        own = checked_steps(cell.scenario.name, cell.tasks, others=5 if cell.maps else 2)
        if cut[-1] and steps + own > most:
            cut.append([])
            steps = 0
        cut[-1].append(cell)
        steps += own
    return cut


def study_name(study: Study) -> str:
    """Stable per study: the cluster's cache is kept under this name."""
    return "csc-study-" + re.sub(r"[^a-z0-9]+", "-", study.name.lower()).strip("-")


def table_request(study: Study, sources: Mapping[str, DataSource], tried: Iterable[Cell]) -> str:
    """What `collect` is told; it is checked here, because that step comes after all runs.

    A cell has been tried if one that asks for the same run was.
    """
    runs = {cell.run for cell in tried}
    content = {
        "study": msgspec.to_builtins(study),
        "sources": {name: source.uri for name, source in sources.items()},
        "tried": [number for number, cell in enumerate(cells_of(study, sources)) if cell.run in runs],
    }
    return TableRequest.from_plain(content, f"study '{study.name}'").to_json()


def build_study(
    study: Study,
    cells: Iterable[Cell],
    sources: Mapping[str, DataSource],
    profile: Profile = LOCAL,
    parallelism: int | None = None,
) -> BaseComponent:
    """Make the pipeline of a study; `parallelism`, or else the profile, says how many cells run at the same time."""
    study_loops = loops(cells)
    request = table_request(study, sources, [cell for loop in study_loops for cell in loop.cells])
    pipelines = [
        build_pipeline(loop.scenario, loop.source.classes, json.loads(loop.items[0]), profile) for loop in study_loops
    ]
    at_once = parallelism or profile.study.parallelism

    @dsl.pipeline(name=study_name(study), description=study.title)
    def study_pipeline(
        checkpoints: str = profile.storage.checkpoints, gpus: str = str(max(profile.gpu.count, 1))
    ) -> None:
        """The cells of a study, side by side, then its tables.

        Args:
            checkpoints: Folder on a volume that outlives the steps, for resuming a training that died; empty for none.
            gpus: GPUs of a train or evaluate step.
        """
        tables = apply(profile, collect(order=request))
        tables.set_caching_options(False)
        with dsl.ExitHandler(tables, name="cells"):
            maps = _embed_steps(study_loops, profile)
            for loop, pipeline in zip(study_loops, pipelines, strict=True):
                with dsl.ParallelFor(loop.items, name=loop.scenario.name, parallelism=at_once) as config:
                    run = pipeline(data=loop.source.uri, config=config, checkpoints=checkpoints, gpus=gpus)
                    run.after(*(maps[key] for key in dict.fromkeys(cell.maps for cell in loop.cells) if key))

    return study_pipeline


def _embed_steps(study_loops: Sequence[Loop], profile: Profile) -> dict[tuple[Any, ...], dsl.PipelineTask]:
    """One embed step for all cells that share their maps; the one that asks for most variants stands for the others."""
    uris = {loop.scenario.dataset: loop.source.uri for loop in study_loops}
    makers: dict[tuple[Any, ...], Cell] = {}
    for cell in (cell for loop in study_loops for cell in loop.cells if cell.maps):
        makers[cell.maps] = max(makers.get(cell.maps, cell), cell, key=lambda cell: cell.variants)
    steps = {}
    for key, cell in makers.items():
        origin = open_data(profile, cell.scenario.name, uris[cell.scenario.dataset])
        step = embed(origin=origin, scenario=cell.scenario.name, config=cell.settings)
        steps[key] = apply(profile, step, gpus=1).set_caching_options(False)
    return steps
