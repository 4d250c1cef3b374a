"""The calibration of a task's model: a temperature, and a threshold for each class, fitted on training images.

Both are kept with the model (`calibration` in model.json) for those who read its scores; they change neither weights
nor scores. The test images have no part in them.

    temperature  one for the model, fitted on the labels that the task shows, those of its new classes
    thresholds   by F1; of new classes on their labels, of old ones on what the prior model predicts in the same images

The images of a task show no label of an old class, but its scores drift with every task. So an old threshold is not
kept as it is: it is chosen again such that the model predicts what the prior model predicted, at its own thresholds. A
class that the prior model finds in none of the images keeps its threshold.

The closed forms (`ridge`, `l3a`) keep the threshold of the settings: their scores are probabilities that follow from
the images of all tasks. Thresholds fitted on those of one task, which show few negatives, were worse for ridge on
held-out training images.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from csc.data.feature_maps import map_channels
from csc.model import load_network, read_card
from csc.training.device import for_inference

if TYPE_CHECKING:
    from csc.training.objective import Objective

__all__ = ["best_thresholds", "calibrate", "fit_temperature"]

MOST_IMAGES = 2_000  # training images that are looked at
GRID = np.arange(1, 100) / 100  # thresholds to choose from
_SLACK = 0.02  # of F1, within which thresholds count as equally good
_COOLEST, _HOTTEST = 0.2, 5.0

Values = NDArray[np.floating[Any]]
Labels = NDArray[np.bool_]


def calibrate(objective: "Objective", prior_folder: Path | None) -> dict[str, Any]:
    """Fit temperature and thresholds for a network that has been trained, on some of its training images as they are.

    Every process of a group has to call this. `prior_folder` is the prior model, if there is one.
    """
    examples, classes = objective.examples, objective.classes
    if objective.method.solves:
        return {"temperature": 1.0, "thresholds": dict.fromkeys(classes, objective.config.threshold)}
    rows = np.sort(np.random.default_rng([examples.seed, 4]).permutation(examples.task_rows)[:MOST_IMAGES])
    logits, targets = objective.logits(rows.tolist()).numpy(), examples.view.targets()[rows]
    old = 0 if objective.config.labels == "seen" else objective.old
    thresholds = best_thresholds(_sigmoid(logits[:, old:]), targets[:, old:])
    if old and prior_folder is not None:
        thresholds = [*_old_thresholds(objective, rows.tolist(), _sigmoid(logits[:, :old]), prior_folder), *thresholds]
    return {
        "temperature": fit_temperature(logits[:, old:], targets[:, old:]),
        "thresholds": dict(zip(classes, thresholds, strict=True)),
    }


def _old_thresholds(
    objective: "Objective", rows: Sequence[int], confidences: Values, prior_folder: Path
) -> list[float]:
    """The thresholds of old classes with which the network predicts what the prior model predicts with its own."""
    examples, prior = objective.examples, objective.prior
    if prior is None:
        network, _ = load_network(prior_folder, map_channels=map_channels(examples.maps_uri))
        prior = for_inference(network, objective.config, objective.device)
    before = read_card(prior_folder).thresholds
    kept = [before[name] for name in objective.classes[: confidences.shape[1]]]
    predicted = _sigmoid(examples.apply(prior, rows).numpy()) > np.array(kept)
    again = best_thresholds(confidences, predicted)
    return [new if found.any() else old for new, old, found in zip(again, kept, predicted.T, strict=True)]


def fit_temperature(logits: Values, targets: Labels) -> float:
    """The temperature T for which sigmoid(logits / T) has the smallest cross-entropy with the targets.

    The loss is convex in 1/T, so its slope has one zero, which is found by halving. T stays between 0.2 and 5: labels
    that a network has learned by heart would have it near 0. Without both present and absent labels it is 1.

    >>> fit_temperature(np.array([4.0, 4.0, 4.0, -4.0]), np.array([True, True, False, False])) > 2
    True
    """
    z, y = logits.ravel().astype(np.float64), targets.ravel()
    if y.all() or not y.any():
        return 1.0
    low, high = np.log(_COOLEST), np.log(_HOTTEST)
    for _ in range(40):
        middle = (low + high) / 2
        slope = np.mean((_sigmoid(z / np.exp(middle)) - y) * z)  # of the loss, by 1/T
        low, high = (middle, high) if slope > 0 else (low, middle)
    return round(float(np.exp((low + high) / 2)), 4)


def best_thresholds(confidences: Values, targets: Labels) -> list[float]:
    """The highest threshold of each class whose F1 is within two points of the best.

    A task shows no image without a new class, and those are where most false alarms come from. So of thresholds that
    do about equally well on the images at hand the highest is taken.

    >>> best_thresholds(np.array([[0.9], [0.7], [0.3]]), np.array([[True], [True], [False]]))
    [0.69]
    """
    chosen = []
    for column, present in zip(confidences.T, targets.T, strict=True):
        predicted = column[:, None] > GRID  # (images, thresholds)
        found = np.count_nonzero(predicted & present[:, None], axis=0)
        f1 = 2 * found / np.maximum(np.count_nonzero(predicted, axis=0) + np.count_nonzero(present), 1)
        chosen.append(float(GRID[f1 >= f1.max() - _SLACK][-1]))
    return chosen


def _sigmoid(logits: Values) -> Values:
    confidences: Values = 1 / (1 + np.exp(-logits.astype(np.float64)))
    return confidences
