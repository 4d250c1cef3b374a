"""Register the model of a task in MLflow, with its metrics, lineage and alias."""

from kfp import dsl

from csc.components.image import CPU_IMAGE


@dsl.component(base_image=CPU_IMAGE, install_kfp_package=False)
def register(
    model: dsl.Input[dsl.Model],
    metrics: dsl.Input[dsl.Metrics],
    test_view: dsl.Input[dsl.Dataset],
    scores: dsl.Input[dsl.Dataset],
    registered: dsl.Output[dsl.Model],
    prior: dsl.Input[dsl.Model] = None,
):
    """Register one task.

    Args:
        model: Model folder of the task.
        metrics: metrics.json of the task.
        test_view: test.parquet, noted as the data that the metrics are of.
        scores: scores.parquet and evidence.parquet, kept with the task's run to compare and to show.
        registered: registered.json, the version and the results so far; its metadata has mlflow_uri and mlflow_run.
        prior: registered.json of the task before; none for the base task.
    """
    from csc.steps.register import register

    prior_path = prior.path if prior else ""
    metadata = register(model.path, metrics.path, test_view.path, registered.path, prior_path, scores.path)
    registered.metadata.update(metadata)
