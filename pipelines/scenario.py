"""The pipeline of a scenario: ingest, then a chain of tasks, then the report.

KFP has no loop whose iterations see each other, so the tasks are unrolled when the pipeline is compiled: one
sub-pipeline per task, each taking the registered model of the one before. Settings, data, checkpoints and GPUs are
run-time arguments; scenario, tasks and profile are fixed by compiling. A window of later tasks begins with the model of
the task before it, looked up in the registry.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from csc.components.build_dataset.component import build_dataset
from csc.components.embed.component import embed
from csc.components.evaluate.component import evaluate
from csc.components.finish.component import finish
from csc.components.ingest.component import ingest
from csc.components.prior.component import prior as prior_model
from csc.components.register.component import register
from csc.components.report.component import report
from csc.components.split_labels.component import split_labels
from csc.components.train.component import train
from csc.components.train_on_nodes.component import train_on_nodes
from csc.config import differences, resolve
from csc.pipelines.package import write_package
from csc.pipelines.pods import apply
from csc.pipelines.profile import Profile, run_defaults
from csc.pipelines.window import Window
from csc.scenario import Scenario

__all__ = [
    "LOCAL",
    "Learned",
    "Results",
    "TaskInputs",
    "build_pipeline",
    "compile_pipeline",
    "learn_split",
    "open_data",
    "pipeline_name",
    "pipeline_of",
]

LOCAL = Profile()

# What the pages of a cluster say of a run's arguments.
ARGUMENTS = """A scenario run.

Args:
    data: Folder or s3:// prefix of the data set.
    config: Settings that differ from the defaults, as JSON; `csc settings` lists them.
    checkpoints: Folder on a volume that outlives the steps, for resuming a training that died; empty for none.
    gpus: GPUs of a train or evaluate step.
"""


class TaskInputs(NamedTuple):
    """What the steps of every task are given, each a parameter of its sub-pipeline."""

    origin: str
    config: str
    checkpoints: str
    features: str
    gpus: str


class Learned(NamedTuple):
    """What a task ends in."""

    registered: dsl.Model


class Results(NamedTuple):
    """What a scenario run ends in."""

    table: str
    page: dsl.HTML


def open_data(profile: Profile, scenario: str, data: str) -> str:
    """Wire the step that opens a data set; return its origin.

    It always looks at the data itself; what follows is cached by what it finds.
    """
    origin: str = apply(profile, ingest(scenario=scenario, data=data)).set_caching_options(False).outputs["origin"]
    return origin


def learn_split(
    profile: Profile, trainer: BaseComponent, inputs: TaskInputs, split: dsl.Artifact, **prior: dsl.Model
) -> tuple[dsl.Model, dsl.Model]:
    """Wire the steps of a task after its split; return the model folder and the registered model.

    The base task has no `prior`.
    """
    views = apply(profile, build_dataset(origin=inputs.origin, config=inputs.config, split=split))
    train_view, test_view = views.outputs["train_view"], views.outputs["test_view"]
    trained = trainer(
        config=inputs.config,
        checkpoints=inputs.checkpoints,
        features=inputs.features,
        split=split,
        train_view=train_view,
        **prior,
    )
    model = apply(profile, trained, inputs.gpus).outputs["model"]
    scored = apply(profile, evaluate(features=inputs.features, model=model, test_view=test_view, **prior), inputs.gpus)
    metrics, scores = scored.outputs["metrics"], scored.outputs["scores"]
    kept = apply(profile, register(model=model, metrics=metrics, test_view=test_view, scores=scores, **prior))
    return model, kept.outputs["registered"]


def _tasks_with(trainer: BaseComponent, profile: Profile) -> tuple[BaseComponent, BaseComponent]:
    """The sub-pipelines of a first and of a later task, whose models the given component trains."""

    def learned(inputs: TaskInputs, scenario: str, task: int, tasks: int, **prior: dsl.Model) -> Learned:
        step = split_labels(origin=inputs.origin, scenario=scenario, task=task, tasks=tasks)
        split = apply(profile, step).outputs["split"]
        _, registered = learn_split(profile, trainer, inputs, split, **prior)
        return Learned(registered)

    @dsl.pipeline(name="base-task", description="The first task of a scenario.")
    def base_task(
        origin: str, scenario: str, config: str, checkpoints: str, features: str, gpus: str, task: int, tasks: int
    ) -> Learned:
        return learned(TaskInputs(origin, config, checkpoints, features, gpus), scenario, task, tasks)

    @dsl.pipeline(name="incremental-task", description="A later task, which starts from the registered model before.")
    def incremental_task(
        origin: str,
        scenario: str,
        config: str,
        checkpoints: str,
        features: str,
        gpus: str,
        task: int,
        tasks: int,
        prior: dsl.Input[dsl.Model],
    ) -> Learned:
        return learned(TaskInputs(origin, config, checkpoints, features, gpus), scenario, task, tasks, prior=prior)

    return base_task, incremental_task


def pipeline_name(scenario: Scenario) -> str:
    """Stable per scenario: the cluster's cache is kept under this name."""
    return re.sub(r"[._+]", "-", f"csc-{scenario.name}")


def pipeline_of(
    steps: Callable[..., dsl.PipelineTask],
    profile: Profile,
    scenario: Scenario,
    description: str,
    on_cluster: bool,
    **extended: str,
) -> BaseComponent:
    """Make the pipeline of a run.

    `steps` wires all steps and returns the last, the report. Its parameters, `data` and `config` among them, and its
    docstring become those of the pipeline. `on_cluster` an exit handler closes the MLflow runs of a run that failed; it
    is told the fingerprint of the model that the run extends, if it does. A pipeline with one has no outputs, by a rule
    of kfp; one without returns its table and page, and its caller closes the runs.
    """
    signature = inspect.signature(steps)

    def run(*values: Any) -> Results | None:
        if not on_cluster:
            results = steps(*values)
            return Results(results.outputs["text"], results.outputs["page"])
        named = signature.bind(*values).arguments
        closing = finish(scenario=scenario.name, data=named["data"], config=named["config"], **extended)
        with dsl.ExitHandler(apply(profile, closing).set_caching_options(False), name=scenario.name):
            steps(*values)
        return None

    run.__doc__ = steps.__doc__
    # kfp reads the arguments of a pipeline and its outputs from here.
    run.__signature__ = signature.replace(return_annotation=None if on_cluster else Results)  # type: ignore[attr-defined]
    made: BaseComponent = dsl.pipeline(name=pipeline_name(scenario), description=description)(run)
    return made


def build_pipeline(
    scenario: Scenario,
    classes: int,
    settings: Mapping[str, Any] = {},
    profile: Profile = LOCAL,
    window: Window | None = None,
    on_cluster: bool = False,
) -> BaseComponent:
    """Make the pipeline of a scenario, with the tasks of a window or all of them; `on_cluster` is for `pipeline_of`.

    The settings become the default of the run-time argument `config`. With `features.views` the pipeline gets an embed
    step, with `train.nodes` above 1 its tasks are trained by the Kubeflow Trainer.
    """
    window = window or Window.parse(None, scenario, classes)
    resolved = resolve(scenario.dataset, settings)
    default = differences(scenario.dataset, resolved)
    base_task, incremental_task = _tasks_with(train_on_nodes if resolved.train.nodes > 1 else train, profile)

    def steps(data: str, config: str = default, checkpoints: str = "", gpus: str = "1") -> dsl.PipelineTask:
        known = {"origin": open_data(profile, scenario.name, data), "scenario": scenario.name, "config": config}
        features: Any = ""
        if resolved.features.views:
            maps = apply(profile, embed(**known), gpus=1)  # one process makes them, on one GPU
            features = maps.set_caching_options(False).output
        shared = {**known, "checkpoints": checkpoints, "features": features, "gpus": gpus, "tasks": window.total}
        last: Any = None  # the step whose model the next task starts from
        if window.first > 1:
            # Cached, unlike ingest: the same registered task again, so that finished tasks of the window are reused.
            last = apply(profile, prior_model(task=window.first - 1, **known))
        for task in range(window.first, window.last + 1):
            if last is None:
                step = base_task(task=task, **shared)
            else:
                step = incremental_task(task=task, prior=last.output, **shared)
            last = step.set_display_name(f"task-{task:02d}")
        return apply(profile, report(registered=last.output))

    steps.__doc__ = ARGUMENTS
    return pipeline_of(steps, profile, scenario, scenario.announcement(classes), on_cluster)


def compile_pipeline(
    scenario: Scenario,
    classes: int,
    out: Path,
    settings: Mapping[str, Any] = {},
    profile: Profile = LOCAL,
    window: Window | None = None,
    on_cluster: bool = False,
) -> None:
    """Write the compiled pipeline of a scenario as YAML; what the profile knows becomes the default of an argument."""
    pipeline = build_pipeline(scenario, classes, settings, profile, window, on_cluster)
    write_package(pipeline, out, run_defaults(profile, scenario), on_cluster)
