"""From scores to numbers: the metrics of the paper, and their calibration.

Every function takes the sigmoid `confidences` (images, classes) and `targets`, the labels as booleans of the
same shape, and keeps no state. Fractions are 0..1 here; only `evaluate` speaks in percent, as the paper does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from csc.errors import BadData

__all__ = [
    "average_precision",
    "calibration_error",
    "calibration_errors",
    "confidence_bins",
    "entropy",
    "evaluate",
    "expected_calibration_error",
    "false_positive_rate",
    "forgetting",
    "precision_recall_f1",
    "rates",
    "roc_curve",
    "scaled",
    "summary",
]

Confidences = NDArray[np.floating[Any]]
Targets = NDArray[np.bool_]
Counts = NDArray[np.intp]

_ENTROPY_EPSILON = 1e-5  # inside the logarithm, as in the loss


def average_precision(confidences: Confidences, targets: Targets) -> NDArray[np.float64]:
    """Return the non-interpolated average precision of each class.

    The precision among the images with at least the confidence of a positive, averaged over the positives; images with
    equal ones count together, whatever their order, as in scikit-learn. A class without positives gives 0.

    >>> confidences = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    >>> targets = np.array([[True, False], [False, False], [True, False]])
    >>> average_precision(confidences, targets).round(4)
    array([0.8333, 0.    ])
    """
    precisions = np.zeros(confidences.shape[1])
    for index, (column, present) in enumerate(zip(confidences.T, targets.T, strict=True)):
        everything, positives = np.sort(column), np.sort(column[present])
        if positives.size:
            positives_above = positives.size - np.searchsorted(positives, positives)
            precisions[index] = np.mean(positives_above / (everything.size - np.searchsorted(everything, positives)))
    return precisions


def precision_recall_f1(
    confidences: Confidences, targets: Targets, threshold: float | Confidences = 0.8
) -> dict[str, float]:
    """Compare the labels whose confidence is above the threshold, one for all or one per class, with the targets.

    CP, CR and CF1 are means over classes of precision, recall and F1 (CF1 is not the harmonic mean of CP and CR), OP,
    OR and OF1 those of all (image, class) pairs. A ratio is 0 where it is undefined: P and R of a class without true
    positives, OP without predictions.

    >>> confidences = np.array([[0.9, 0.9], [0.9, 0.1]])
    >>> targets = np.array([[True, False], [False, True]])
    >>> {name: round(value, 2) for name, value in precision_recall_f1(confidences, targets).items()}
    {'CP': 0.25, 'CR': 0.5, 'CF1': 0.33, 'OP': 0.33, 'OR': 0.5, 'OF1': 0.4}
    """
    predicted = confidences > threshold
    counts = (np.count_nonzero(kind, axis=0) for kind in (predicted & targets, predicted, targets))
    return rates(*counts)


def rates(correct: Counts, predicted: Counts, present: Counts) -> dict[str, float]:
    """Return what `precision_recall_f1` does, from the labels of each class: predicted, present, and both (`correct`).

    >>> rates(np.array([1, 0]), np.array([2, 1]), np.array([1, 1]))["CP"]
    0.25
    """
    return {
        "CP": float(np.mean(_ratio(correct, predicted))),
        "CR": float(np.mean(_ratio(correct, present))),
        "CF1": float(np.mean(_ratio(2 * correct, predicted + present))),
        "OP": float(_ratio(correct.sum(), predicted.sum())),
        "OR": float(_ratio(correct.sum(), present.sum())),
        "OF1": float(_ratio(2 * correct.sum(), predicted.sum() + present.sum())),
    }


def false_positive_rate(confidences: Confidences, targets: Targets, threshold: float = 0.8) -> float:
    """Return the part of all absent labels that is predicted: FP / (FP + TN) over all (image, class) pairs.

    The paper gives no formula; REPRODUCIBILITY.md says why it is this one.

    >>> false_positive_rate(np.array([[0.9, 0.9, 0.1]]), np.array([[True, False, False]]))
    0.5
    """
    absent = ~targets
    return float(_ratio(np.count_nonzero((confidences > threshold) & absent), np.count_nonzero(absent)))


def roc_curve(confidences: Confidences, targets: Targets, points: int = 100) -> tuple[NDArray[np.floating[Any]], ...]:
    """Return false and true positive rates over all (image, class) pairs, and the thresholds they belong to.

    A pair counts from the threshold on. The thresholds fall from 1 to 0, and part the present labels evenly, so that
    the curve is as fine for confidences that are all small. Without present or without absent labels there is no curve.

    >>> fpr, tpr, _ = roc_curve(np.array([[0.9, 0.6], [0.7, 0.1]]), np.array([[True, False], [True, False]]), 2)
    >>> fpr.tolist(), tpr.tolist()
    ([0.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    present, absent = np.sort(confidences[targets]), np.sort(confidences[~targets])
    if not (present.size and absent.size):
        return np.empty(0), np.empty(0), np.empty(0)
    chosen = present[np.linspace(0, present.size - 1, points).astype(int)]
    thresholds = np.unique(np.concatenate([[0, 1], chosen]))[::-1]
    fpr, tpr = (1 - np.searchsorted(part, thresholds) / part.size for part in (absent, present))
    return fpr, tpr, thresholds


def entropy(confidences: Confidences) -> float:
    """Return H of the paper in nats: the mean over images of the sum over classes of -p ln(p + 1e-5).

    It is one-sided: a class adds at most 1/e, at p = 1/e, and (almost) nothing at 0 and 1.

    >>> round(entropy(np.array([[0.5, 1.0], [0.5, 0.0]])), 4)
    0.3466
    """
    terms = -confidences * np.log(confidences + confidences.dtype.type(_ENTROPY_EPSILON))
    return float(terms.sum(dtype=np.float64) / len(confidences))


def expected_calibration_error(
    confidences: Confidences, targets: Targets, bins: int = 15, *, adaptive: bool = False
) -> float:
    """Return how far confidence is from the frequency of being right, over all (image, class) pairs.

    Pairs fall into bins of equal width or, `adaptive`, of about equal size: most pairs have a confidence near 0, where
    bins of equal width put them all together. |mean confidence - fraction positive| of each bin is weighted by its
    size. Pairs of equal confidence are never parted.

    >>> round(expected_calibration_error(np.array([[0.9], [0.9], [0.2]]), np.array([[True], [False], [False]])), 4)
    0.3333
    """
    return calibration_error(*confidence_bins(confidences, targets, bins, adaptive=adaptive))


def calibration_error(count: ArrayLike, confidence: ArrayLike, present: ArrayLike) -> float:
    """Return the expected calibration error of `confidence_bins`; the size of a bin cancels with its weight.

    >>> round(calibration_error([1, 2], [0.2, 1.8], [0, 1]), 4)
    0.3333
    """
    return float(np.abs(np.asarray(confidence) - np.asarray(present)).sum() / np.maximum(np.sum(count), 1))


def confidence_bins(
    confidences: Confidences, targets: Targets, bins: int = 15, *, adaptive: bool = False
) -> tuple[Counts, NDArray[np.float64], Counts]:
    """Return of each bin of confidence how many labels it has, the sum of their confidences, how many are present.

    A bin holds its lower edge, the last one also 1. See `expected_calibration_error` for `adaptive`.
    """
    parts = np.arange(1, bins) / bins  # edges are in the precision of the confidences
    edges = np.quantile(confidences, parts, method="higher") if adaptive else parts.astype(confidences.dtype)
    index = np.searchsorted(edges, confidences.ravel(), side="right")
    confidence = np.bincount(index, weights=confidences.ravel(), minlength=bins).astype(np.float64)
    present = np.bincount(index[targets.ravel()], minlength=bins)
    return np.bincount(index, minlength=bins), confidence, present


def calibration_errors(
    confidences: Confidences, targets: Targets, old: int, temperature: float = 1.0
) -> dict[str, float]:
    """Return ECE and AECE (adaptive) of all, the first `old` and the new classes, as they are and after scaling (`_T`).

    Without old classes theirs is 0.

    >>> sorted(calibration_errors(np.array([[0.9, 0.1]]), np.array([[True, False]]), 1))[:3]
    ['AECE', 'AECE_T', 'AECE_new']
    """
    errors = {}
    for suffix, shown in (("", confidences), ("_T", scaled(confidences, temperature))):
        for part, columns in (("", slice(None)), ("_old", slice(old)), ("_new", slice(old, None))):
            for name, adaptive in (("ECE", False), ("AECE", True)):
                chosen = shown[:, columns], targets[:, columns]
                error = expected_calibration_error(*chosen, adaptive=adaptive) if chosen[0].size else 0.0
                errors[f"{name}{part}{suffix}"] = error
    return errors


def scaled(confidences: Confidences, temperature: float) -> Confidences:
    """Return confidences with their logits divided by a temperature.

    >>> scaled(np.array([0.5, 0.9]), 2.0).round(2)
    array([0.5 , 0.75])
    """
    edge = np.finfo(np.float32).eps / 2  # a confidence of 0 or 1 has no logit
    inside = np.clip(confidences.astype(np.float64), edge, 1 - edge)
    logits = np.log(inside) - np.log1p(-inside)
    divided: Confidences = 1 / (1 + np.exp(-logits / temperature))
    return divided


def forgetting(best_ap: Mapping[str, float], ap: Mapping[str, float]) -> float:
    """Return how much AP the classes of earlier tasks have lost, on average, since each was at its best (`best_ap`).

    >>> forgetting({"cat": 90.0, "cow": 80.0}, {"cat": 70.0, "cow": 84.0, "dog": 95.0})
    8.0
    >>> forgetting({}, {"cat": 70.0})
    0.0
    """
    if not best_ap:
        return 0.0
    return sum(best - ap[name] for name, best in best_ap.items()) / len(best_ap)


def evaluate(
    confidences: Confidences,
    targets: Targets,
    classes: Sequence[str],
    threshold: float = 0.8,
    best_ap: Mapping[str, float] = {},
    *,
    old: int = 0,
    temperature: float = 1.0,
    thresholds: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Return all metrics of one task as plain finite numbers, ready for `metrics.json`.

    mAP, CF1, OF1, CP, CR, OP, OR, FPR, `AP` and `best_AP` by class and the calibration errors are in percent,
    `forgetting` in percent points, `H` in nats; `confidence` is the histogram of the confidences of present labels
    (`positives`) and absent ones.

    `best_ap` is `best_AP` of the task before. The first `old` of the classes are of earlier tasks. `temperature` and
    `thresholds` are of the model's calibration: CF1_own and OF1_own are those at `thresholds`, and at `threshold` for
    a class that has none.

    >>> metrics = evaluate(np.array([[0.9, 0.3], [0.2, 0.7]]), np.array([[True, False], [False, True]]), ["a", "b"])
    >>> metrics["mAP"], metrics["CF1"], metrics["AP"]
    (100.0, 50.0, {'a': 100.0, 'b': 100.0})
    """
    _check(confidences, targets, classes, best_ap)
    # The dtype stays as it is: 0.8 as float32 is not above a threshold of 0.8, but would be after a cast to float64.
    ap = dict(zip(classes, (100 * average_precision(confidences, targets)).tolist(), strict=True))
    count, _, present = confidence_bins(confidences, targets, bins=10)
    own = np.array([thresholds.get(name, threshold) for name in classes], confidences.dtype)
    at_own = precision_recall_f1(confidences, targets, own)
    return {
        "mAP": sum(ap.values()) / len(ap),
        **{name: 100 * value for name, value in precision_recall_f1(confidences, targets, threshold).items()},
        "FPR": 100 * false_positive_rate(confidences, targets, threshold),
        **{name: 100 * value for name, value in calibration_errors(confidences, targets, old, temperature).items()},
        "CF1_own": 100 * at_own["CF1"],
        "OF1_own": 100 * at_own["OF1"],
        "temperature": float(temperature),
        "H": entropy(confidences),
        "forgetting": forgetting(best_ap, ap),
        "images": len(confidences),
        "threshold": float(threshold),
        "AP": ap,
        "best_AP": {name: max(value, float(best_ap.get(name, value))) for name, value in ap.items()},
        "confidence": {
            "edges": (np.arange(11) / 10).tolist(),
            "positives": present.tolist(),
            "negatives": (count - present).tolist(),
        },
    }


def summary(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers the paper's tables print, from the metrics of all tasks in order, the base task included.

    >>> base = {"mAP": 90.0, "CF1": 80.0, "OF1": 82.0, "forgetting": 0.0}
    >>> summary([base, {"mAP": 70.0, "CF1": 60.0, "OF1": 62.0, "forgetting": 12.5}])
    {'avg_mAP': 80.0, 'last_mAP': 70.0, 'last_CF1': 60.0, 'last_OF1': 62.0, 'forgetting': 12.5}
    """
    if not history:
        raise BadData("no evaluated task: a summary needs the metrics of at least one")
    last = history[-1]
    return {
        "avg_mAP": sum(float(metrics["mAP"]) for metrics in history) / len(history),
        "last_mAP": float(last["mAP"]),
        "last_CF1": float(last["CF1"]),
        "last_OF1": float(last["OF1"]),
        "forgetting": float(last["forgetting"]),
    }


def _ratio(part: Any, whole: Any) -> NDArray[np.float64]:
    """Divide counts; 0 where there is nothing to divide by."""
    return np.asarray(part / np.maximum(whole, 1), dtype=np.float64)


def _check(confidences: Confidences, targets: Targets, classes: Sequence[str], best_ap: Mapping[str, float]) -> None:
    """Refuse inputs that would give wrong or infinite numbers, in one line."""
    if confidences.ndim != 2 or confidences.shape != targets.shape:
        raise BadData(
            f"scores {confidences.shape} and targets {targets.shape} must have the same shape (images, classes)"
        )
    if confidences.size == 0:
        raise BadData(f"scores {confidences.shape}: nothing to evaluate without an image and a class")
    if len(classes) != confidences.shape[1] or len(set(classes)) != len(classes):
        raise BadData(
            f"{confidences.shape[1]} columns of scores need as many different class names, got {list(classes)}"
        )
    if targets.dtype != np.bool_:
        raise BadData(f"targets are {targets.dtype}: expected booleans")
    _check_confidences(confidences, classes)
    if unknown := sorted(set(best_ap) - set(classes)):
        raise BadData(f"best AP of classes that are not evaluated: {', '.join(unknown)}; seen classes never leave")


def _check_confidences(confidences: Confidences, classes: Sequence[str]) -> None:
    """Refuse what is not a confidence and say where the first one is; NaN fails the comparison too."""
    wrong = ~((confidences >= 0) & (confidences <= 1))
    if wrong.any():
        image, column = (int(index) for index in np.argwhere(wrong)[0])
        raise BadData(
            f"{np.count_nonzero(wrong)} scores are not between 0 and 1, the first is {confidences[image, column]} "
            f"(row {image}, class {classes[column]}); expected finite sigmoid confidences"
        )
