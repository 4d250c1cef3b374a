"""The pipeline of a scenario: ingest, then a chain of tasks, then the report.

KFP has no loop whose turns see each other, so the tasks are unrolled when the pipeline is compiled: one sub-pipeline
per task, each taking the registered model of the one before. Settings, data place, checkpoints and GPUs are run-time
arguments; scenario and number of tasks are fixed by compiling.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from kfp import compiler, dsl, kubernetes
from kfp.dsl.base_component import BaseComponent

from csc.components.build_dataset.component import build_dataset
from csc.components.evaluate.component import evaluate
from csc.components.ingest.component import ingest
from csc.components.register.component import register
from csc.components.report.component import report
from csc.components.split_labels.component import split_labels
from csc.components.train.component import train
from csc.scenario import Scenario
from csc.storage import atomic_file

__all__ = ["build_pipeline", "compile_pipeline", "pipeline_name"]


class Results(NamedTuple):
    """What a scenario run ends in."""

    table: str
    page: dsl.HTML


def _task_steps(origin, scenario, config, checkpoints, gpus, task, tasks, **prior):
    """Wire the five steps of a task; `prior` is empty for the base task, which has no model before it."""
    split = split_labels(origin=origin, scenario=scenario, task=task, tasks=tasks)
    views = build_dataset(origin=origin, config=config, split=split.outputs["split"])
    trained = train(
        config=config,
        checkpoints=checkpoints,
        split=split.outputs["split"],
        train_view=views.outputs["train_view"],
        **prior,
    )
    scored = evaluate(model=trained.outputs["model"], test_view=views.outputs["test_view"], **prior)
    for heavy in (trained, scored):
        _on_gpu_node(heavy, gpus)
    return register(
        model=trained.outputs["model"],
        metrics=scored.outputs["metrics"],
        test_view=views.outputs["test_view"],
        **prior,
    )


def _on_gpu_node(step, gpus):
    """Ask for GPUs, and for the shared memory that loader processes hand batches through (a pod has 64 MB of it)."""
    step.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(gpus)
    kubernetes.empty_dir_mount(step, volume_name="shm", mount_path="/dev/shm", medium="Memory")


@dsl.pipeline(name="base-task", description="The first task of a scenario.")
def base_task(origin: str, scenario: str, config: str, checkpoints: str, gpus: int, task: int, tasks: int) -> dsl.Model:
    """Split, build, train, evaluate and register the base task."""
    return _task_steps(origin, scenario, config, checkpoints, gpus, task, tasks).outputs["registered"]


@dsl.pipeline(name="incremental-task", description="A later task, which starts from the registered model before it.")
def incremental_task(
    origin: str,
    scenario: str,
    config: str,
    checkpoints: str,
    gpus: int,
    task: int,
    tasks: int,
    prior: dsl.Input[dsl.Model],
) -> dsl.Model:
    """Split, build, train, evaluate and register a task that follows another."""
    return _task_steps(origin, scenario, config, checkpoints, gpus, task, tasks, prior=prior).outputs["registered"]


def pipeline_name(scenario: Scenario) -> str:
    """Stable per scenario: the cluster's cache is kept under this name."""
    return f"csc-{scenario.name}".replace(".", "-").replace("_", "-")


def build_pipeline(scenario: Scenario, classes: int) -> BaseComponent:
    """Make the pipeline of a scenario for a data set of so many classes."""
    tasks = len(scenario.sizes(classes))

    @dsl.pipeline(name=pipeline_name(scenario), description=scenario.announcement(classes))
    def scenario_pipeline(data: str, config: str = "{}", checkpoints: str = "", gpus: int = 1) -> Results:
        opened = ingest(scenario=scenario.name, data=data)
        # Always looks at the data itself; what follows is cached by what it finds.
        opened.set_caching_options(False)
        shared = {
            "origin": opened.output,
            "scenario": scenario.name,
            "config": config,
            "checkpoints": checkpoints,
            "gpus": gpus,
        }
        last = base_task(task=1, tasks=tasks, **shared).set_display_name("task-01")
        for task in range(2, tasks + 1):
            last = incremental_task(task=task, tasks=tasks, prior=last.output, **shared)
            last.set_display_name(f"task-{task:02d}")
        results = report(registered=last.output)
        return Results(results.outputs["Output"], results.outputs["page"])

    return scenario_pipeline


def compile_pipeline(scenario: Scenario, classes: int, out: Path) -> None:
    """Write the compiled pipeline of a scenario as YAML."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build_pipeline(scenario, classes), str(package))
        with atomic_file(out) as aside:
            shutil.copyfile(package, aside)
