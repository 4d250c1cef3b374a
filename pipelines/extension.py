"""The pipeline of `csc extend`: one more task on a registered model, with the classes of another data set.

It has the steps of a later task of a scenario. Only where it begins differs: `extend` finds the model and takes the
classes of the data set as the new ones, where a scenario says what `prior` and `split_labels` do. Old classes have no
labels in the new data. They are judged too if the pipeline gets a data set that labels them.
"""

from pathlib import Path

from kfp import dsl

from csc.components.build_dataset.component import build_dataset
from csc.components.evaluate.component import evaluate
from csc.components.extend.component import extend
from csc.components.log_old_classes.component import log_old_classes
from csc.components.report.component import report
from csc.components.train.component import train
from csc.components.train_on_nodes.component import train_on_nodes
from csc.config import differences
from csc.config.schema import Config
from csc.pipelines.package import write_package
from csc.pipelines.pods import apply
from csc.pipelines.profile import Profile
from csc.pipelines.scenario import LOCAL, Learned, TaskInputs, learn_split, open_data, pipeline_of
from csc.scenario import Scenario

__all__ = ["compile_extension"]

# What the pages of a cluster say of a run's arguments.
ARGUMENTS = """One more task on a registered model.

Args:
    data: Folder or s3:// prefix of the data set with the new classes.
    model: Registered model that is extended, models:/NAME/VERSION.
    test: Folder or s3:// prefix of a data set that labels the old classes; empty if they are not judged.
    config: Settings that differ from the defaults, as JSON.
    checkpoints: Folder on a volume that outlives the steps, for resuming a training that died; empty for none.
    gpus: GPUs of a train or evaluate step.
"""


def compile_extension(
    scenario: Scenario,
    task: int,
    config: Config,
    extended: str,
    out: Path,
    tests_old: bool = False,
    profile: Profile = LOCAL,
    on_cluster: bool = False,
) -> None:
    """Write the pipeline of an extension as YAML; `extended` is the fingerprint of the model that is extended.

    With `tests_old` the old classes are judged too, on the data set of the argument `test`; `on_cluster` is for
    `csc.pipelines.scenario.pipeline_of`.
    """
    trainer = train_on_nodes if config.train.nodes > 1 else train
    default, name = differences(scenario.dataset, config), scenario.name

    @dsl.pipeline(name="extension-task", description="The task that brings the classes of the data set.")
    def extension_task(
        origin: str,
        old: str,
        config: str,
        checkpoints: str,
        gpus: str,
        task: int,
        split: dsl.Input[dsl.Artifact],
        prior: dsl.Input[dsl.Model],
    ) -> Learned:
        given = TaskInputs(origin, config, checkpoints, "", gpus)
        model, registered = learn_split(profile, trainer, given, split, prior=prior)
        if tests_old:
            views = apply(profile, build_dataset(origin=old, config=config, split=split))
            test_view = views.outputs["test_view"]
            judged = apply(profile, evaluate(features="", model=model, test_view=test_view, prior=prior), gpus)
            apply(profile, log_old_classes(registered=registered, metrics=judged.outputs["metrics"]))
        return Learned(registered)

    def steps(
        data: str, model: str, test: str = "", config: str = default, checkpoints: str = "", gpus: str = "1"
    ) -> dsl.PipelineTask:
        origin = open_data(profile, name, data)
        start = apply(profile, extend(origin=origin, scenario=name, model=model))
        learned = extension_task(
            origin=origin,
            old=open_data(profile, name, test) if tests_old else "",
            config=config,
            checkpoints=checkpoints,
            gpus=gpus,
            task=task,
            split=start.outputs["split"],
            prior=start.outputs["registered"],
        ).set_display_name(f"task-{task:02d}")
        return apply(profile, report(registered=learned.output))

    steps.__doc__ = ARGUMENTS
    description = f"{name}: task {task} on a registered model"
    pipeline = pipeline_of(steps, profile, scenario, description, on_cluster, extended=extended)
    write_package(pipeline, out, on_cluster=on_cluster)
