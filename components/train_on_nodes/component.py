"""Train the model of one task on several nodes, as a TrainJob of the Kubeflow Trainer.

The same step as train, for pipelines compiled with train.nodes above 1. Its own pod only starts the job and waits; the
job's pods get what the pipeline sets for the task: resources, environment, volumes and placement.
"""

from kfp import dsl

from csc.components.image import TRAIN_IMAGE

PASSED_ON = [
    dsl.TaskConfigField.RESOURCES,
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.ENV, apply_to_task=True),
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_VOLUMES, apply_to_task=True),
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_TOLERATIONS, apply_to_task=True),
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_NODE_SELECTOR, apply_to_task=True),
    dsl.TaskConfigPassthrough(field=dsl.TaskConfigField.KUBERNETES_AFFINITY, apply_to_task=True),
]


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False, task_config_passthroughs=PASSED_ON)
def train_on_nodes(
    config: str,
    checkpoints: str,
    features: str,
    split: dsl.Input[dsl.Artifact],
    train_view: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    prior: dsl.Input[dsl.Model] = None,
    task_config: dsl.TaskConfig = None,
):
    """Train one task on several nodes.

    Args:
        config: Settings as JSON.
        checkpoints: Folder that outlives the step, on a volume that all nodes mount.
        features: URI of cached feature maps, from embed; empty to learn from images.
        split: split.json of the task.
        train_view: train.parquet of the task; no label of another task can be read from it.
        model: Model folder (safetensors and model.json).
        prior: registered.json of the task before; none for the base task.
        task_config: What the pipeline sets for the step; filled in by the cluster.
    """
    from csc.steps.train import train

    before, pod = prior.path if prior else "", vars(task_config) if task_config else {}
    model.metadata.update(train(config, split.path, train_view.path, model.path, before, checkpoints, features, pod))
