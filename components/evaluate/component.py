"""Score the model of a task on all seen classes and compute its metrics."""

from kfp import dsl

from csc.components.image import TRAIN_IMAGE


@dsl.component(base_image=TRAIN_IMAGE, install_kfp_package=False)
def evaluate(
    features: str,
    model: dsl.Input[dsl.Model],
    test_view: dsl.Input[dsl.Dataset],
    scores: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    roc: dsl.Output[dsl.ClassificationMetrics],
    prior: dsl.Input[dsl.Model] = None,
):
    """Evaluate one task.

    Args:
        features: URI of cached feature maps, from embed; empty to score images.
        model: Model folder of the task.
        test_view: test.parquet of the task.
        scores: scores.parquet, one confidence and one target column per class, and evidence.parquet for the report.
        metrics: metrics.json; the headline numbers are shown in the run's page too.
        roc: The ROC curve over all labels, as the run's page draws it; its points are metadata, its file is empty.
        prior: registered.json of the task before, for forgetting; none for the base task.
    """
    from pathlib import Path

    from csc.artifacts import EVIDENCE, HEADLINE, SCORES
    from csc.steps.evaluate import evaluate, roc_curve

    prior_path = prior.path if prior else ""
    files = [f"{scores.path}/{name}" for name in (SCORES, EVIDENCE)]
    numbers = evaluate(model.path, test_view.path, files[0], metrics.path, prior_path, features, files[1])
    for name in HEADLINE:
        metrics.log_metric(name, round(numbers[name], 2))
    roc.log_roc_curve(*roc_curve(files[0]))
    Path(roc.path).touch()  # a cache takes an output without a file for a lost one
