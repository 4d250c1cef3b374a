"""evaluate: scores of a model on the test view, and the numbers that follow from them."""

import time
from pathlib import Path

import numpy as np

from csc import metrics
from csc.artifacts import HEADLINE, Metrics, RegisteredTask
from csc.data.feature_maps import map_channels
from csc.data.scores import Scores
from csc.data.views import View
from csc.errors import BadModel
from csc.model import load_network, read_card
from csc.retry import with_retries
from csc.scenario import Scenario

__all__ = ["evaluate", "roc_curve"]


@with_retries
def evaluate(
    model: str,
    test_view: str,
    scores_out: str,
    metrics_out: str,
    prior: str = "",
    features: str = "",
    evidence_out: str = "",
) -> Metrics:
    """Score all test images of a task, write `scores.parquet` and `metrics.json`, and return the metrics.

    `prior` is for what the model has forgotten since. `evidence_out` gets what a page shows of the model, if given.
    """
    from csc.distributed.launch import processes_for, run_in_processes

    card, view = read_card(Path(model)), View.read(test_view)
    judged = {name for name in card.classes if name in view.classes}
    if view.classes != card.classes and not (Scenario.parse(card.scenario).added and judged == set(view.classes)):
        raise BadModel(f"{model}: knows other classes than {test_view}; both must be of the same task")
    processes = processes_for(card.resolved_config().train.processes, exactly=False)
    files = {"model": model, "test_view": test_view, "scores_out": scores_out, "features": features}
    started = time.monotonic()
    if processes > 1:
        run_in_processes(score, files, processes)
    else:
        score(**files)
    seconds = time.monotonic() - started
    scores = Scores.read(scores_out)
    prior_best = RegisteredTask.read(prior).run.last.metrics.best_AP if prior else {}
    best_ap = {name: ap for name, ap in prior_best.items() if name in judged}
    numbers = Metrics(
        **metrics.evaluate(
            scores.confidences,
            scores.targets,
            view.classes,
            card.resolved_config().threshold,
            best_ap,
            old=sum(name not in card.new for name in view.classes),
            temperature=card.temperature,
            thresholds=card.thresholds,
        )
    )
    numbers.write(metrics_out)
    if evidence_out:
        from csc.training.inspection import gather_evidence

        gather_evidence(Path(model), view, scores, features, seconds).write(evidence_out)
    head = " · ".join(f"{name} {numbers[name]:.2f}" for name in HEADLINE)
    rest = len(card.classes) - len(judged)
    classes = f"{len(judged)} classes" + (f"; they have no labels of the other {rest}" if rest else "")
    print(f"task {card.task}/{card.tasks}: {head} on {len(view):,} test images, {classes}")
    return numbers


def roc_curve(scores: str) -> tuple[list[float], list[float], list[float]]:
    """The ROC curve of `scores.parquet` as `csc.metrics.roc_curve` gives it, in plain lists."""
    read = Scores.read(scores)
    fpr, tpr, thresholds = metrics.roc_curve(read.confidences, read.targets)
    return fpr.tolist(), tpr.tolist(), thresholds.tolist()


def score(model: str, test_view: str, scores_out: str, features: str) -> None:
    """Write the confidences of a model on a view, batch by batch, as `scores.parquet`; one of several processes may."""
    from csc.distributed.group import join_group
    from csc.training.inference import confidences

    network, card = load_network(Path(model), map_channels=map_channels(features))
    view = View.read(test_view)
    with join_group() as group:
        columns = [card.classes.index(name) for name in view.classes]
        batches = confidences(network, view, card.resolved_config(), features, group)  # every process gets all of them
        made = np.concatenate([batch.numpy()[:, columns] for _, batch in batches])
        if group.is_main:
            Scores(made, view.targets(), view.classes, view.table["image_id"]).write(scores_out)
