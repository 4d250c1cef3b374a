"""Train the model of one task; the prior model comes from the MLflow registry."""

from kfp import dsl

from csc.components.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def train(
    config: str,
    checkpoints: str,
    features: str,
    split: dsl.Input[dsl.Artifact],
    train_view: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    prior: dsl.Input[dsl.Model] = None,
):
    """Train one task.

    Args:
        config: Settings as JSON.
        checkpoints: Folder that outlives the step, for taking up a try that died.
        features: URI of cached feature maps, from embed; empty to learn from images.
        split: split.json of the task.
        train_view: train.parquet of the task; no label of another task can be read from it.
        model: Model folder (safetensors and model.json).
        prior: registered.json of the task before; none for the base task.
    """
    from csc.steps.train import train

    prior_path = prior.path if prior else ""
    model.metadata.update(train(config, split.path, train_view.path, model.path, prior_path, checkpoints, features))
