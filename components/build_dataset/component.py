"""Build the partial-label training view and the test view of a task."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def build_dataset(
    origin: str,
    config: str,
    split: dsl.Input[dsl.Artifact],
    train_view: dsl.Output[dsl.Dataset],
    test_view: dsl.Output[dsl.Dataset],
):
    """Write the two views of one task.

    Args:
        origin: From ingest.
        config: Settings as JSON.
        split: split.json of the task.
        train_view: train.parquet, with labels of the task's new classes only.
        test_view: test.parquet, with labels of all seen classes.
    """
    from csc.steps.build_dataset import build_dataset

    build_dataset(origin, split.path, config, train_out=train_view.path, test_out=test_view.path)
