"""The pipeline of a scenario: ingest, then a chain of tasks, then the report.

KFP has no loop whose turns see each other, so the tasks are unrolled when the pipeline is compiled: one sub-pipeline
per task, each taking the registered model of the one before. Settings, data place, checkpoints and GPUs are run-time
arguments; scenario, tasks and profile are fixed by compiling. A window of later tasks begins with the model of the task
before it, looked up in the registry.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp import compiler, dsl
from kfp.dsl.base_component import BaseComponent

from csc.components.build_dataset.component import build_dataset
from csc.components.embed.component import embed
from csc.components.evaluate.component import evaluate
from csc.components.ingest.component import ingest
from csc.components.prior.component import prior as prior_model
from csc.components.register.component import register
from csc.components.report.component import report
from csc.components.split_labels.component import split_labels
from csc.components.train.component import train
from csc.components.train_on_nodes.component import train_on_nodes
from csc.config import resolve
from csc.pipelines.profile import Profile, apply, run_defaults
from csc.pipelines.window import Window
from csc.scenario import Scenario
from csc.storage import atomic_file

__all__ = ["build_pipeline", "compile_pipeline", "pipeline_name"]

LOCAL = Profile()


class Results(NamedTuple):
    """What a scenario run ends in."""

    table: str
    page: dsl.HTML


def _task_steps(place, train, origin, scenario, config, checkpoints, features, gpus, task, tasks, **prior):
    """Wire the five steps of a task; `prior` is empty for the base task, which has no model before it."""
    split = split_labels(origin=origin, scenario=scenario, task=task, tasks=tasks)
    views = build_dataset(origin=origin, config=config, split=split.outputs["split"])
    trained = train(
        config=config,
        checkpoints=checkpoints,
        features=features,
        split=split.outputs["split"],
        train_view=views.outputs["train_view"],
        **prior,
    )
    scored = evaluate(features=features, model=trained.outputs["model"], test_view=views.outputs["test_view"], **prior)
    registered = register(
        model=trained.outputs["model"],
        metrics=scored.outputs["metrics"],
        test_view=views.outputs["test_view"],
        **prior,
    )
    for light in (split, views, registered):
        apply(place, light)
    for heavy in (trained, scored):
        apply(place, heavy, heavy=True, gpus=gpus)
    return registered


def _embedded(place, origin, scenario, config):
    """Have the feature maps made; the step looks at what is there itself, and is quick when that is everything."""
    step = embed(origin=origin, scenario=scenario, config=config)
    apply(place, step, heavy=True, gpus=1).set_caching_options(False)  # one process makes them, on one GPU
    return step.output


def _tasks_with(train: BaseComponent, place: Profile) -> tuple[BaseComponent, BaseComponent]:
    """The sub-pipelines of a first and of a later task, whose models the given component trains."""

    @dsl.pipeline(name="base-task", description="The first task of a scenario.")
    def base_task(
        origin: str, scenario: str, config: str, checkpoints: str, features: str, gpus: int, task: int, tasks: int
    ) -> dsl.Model:
        steps = _task_steps(place, train, origin, scenario, config, checkpoints, features, gpus, task, tasks)
        return steps.outputs["registered"]

    @dsl.pipeline(name="incremental-task", description="A later task, which starts from the registered model before.")
    def incremental_task(
        origin: str,
        scenario: str,
        config: str,
        checkpoints: str,
        features: str,
        gpus: int,
        task: int,
        tasks: int,
        prior: dsl.Input[dsl.Model],
    ) -> dsl.Model:
        steps = _task_steps(
            place, train, origin, scenario, config, checkpoints, features, gpus, task, tasks, prior=prior
        )
        return steps.outputs["registered"]

    return base_task, incremental_task


def pipeline_name(scenario: Scenario) -> str:
    """Stable per scenario: the cluster's cache is kept under this name."""
    return f"csc-{scenario.name}".replace(".", "-").replace("_", "-")


def build_pipeline(
    scenario: Scenario,
    classes: int,
    settings: Mapping[str, Any] = {},
    profile: Profile = LOCAL,
    window: Window | None = None,
) -> BaseComponent:
    """Make the pipeline of a scenario.

    Args:
        scenario: which classes arrive when.
        classes: how many the data set has.
        settings: overrides that become the default of the run-time argument `config`; with `features.views` the
            pipeline gets an embed step, with `train.nodes` above 1 its tasks are trained by the Kubeflow Trainer.
        profile: of the place where it will run.
        window: the tasks that it has; all of them if not given.
    """
    window = window or Window.parse(None, scenario, classes)
    resolved, default = resolve(scenario.dataset, settings), json.dumps(settings)
    base_task, incremental_task = _tasks_with(train_on_nodes if resolved.train.nodes > 1 else train, profile)

    @dsl.pipeline(name=pipeline_name(scenario), description=scenario.announcement(classes))
    def scenario_pipeline(data: str, config: str = default, checkpoints: str = "", gpus: int = 1) -> Results:
        opened = ingest(scenario=scenario.name, data=data)
        # Always looks at the data itself; what follows is cached by what it finds.
        apply(profile, opened).set_caching_options(False)
        features = _embedded(profile, opened.output, scenario.name, config) if resolved.features.views else ""
        known = {"origin": opened.output, "scenario": scenario.name, "config": config}
        shared = {**known, "checkpoints": checkpoints, "features": features, "gpus": gpus, "tasks": window.total}
        last = None
        if (
            window.first > 1
        ):  # cached, unlike ingest: the same record again, so that finished tasks of the window are reused
            last = apply(profile, prior_model(task=window.first - 1, **known))
        for task in range(window.first, window.last + 1):
            step = (
                base_task(task=task, **shared)
                if last is None
                else incremental_task(task=task, prior=last.output, **shared)
            )
            last = step.set_display_name(f"task-{task:02d}")
        results = apply(profile, report(registered=last.output))
        return Results(results.outputs["Output"], results.outputs["page"])

    return scenario_pipeline


def compile_pipeline(
    scenario: Scenario,
    classes: int,
    out: Path,
    settings: Mapping[str, Any] = {},
    profile: Profile = LOCAL,
    window: Window | None = None,
) -> None:
    """Write the compiled pipeline of a scenario as YAML; what the profile knows becomes the default of an argument."""
    pipeline = build_pipeline(scenario, classes, settings, profile, window)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(package), pipeline_parameters=run_defaults(profile, scenario))
        with atomic_file(out) as aside:
            shutil.copyfile(package, aside)
