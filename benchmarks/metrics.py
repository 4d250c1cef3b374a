"""All metrics of a COCO-sized evaluation, against scikit-learn for the same numbers."""

import numpy as np

from benchmarks import Result, interleaved
from csc import metrics as ours
from csc.errors import CscError

__all__ = ["metrics"]

IMAGES, CLASSES, LABELS_PER_IMAGE = 40_137, 80, 2.9  # the validation split of COCO 2014
TOLERANCE = 1e-9


def metrics() -> list[Result]:
    """Every metric we report, against average precision and precision/recall/F1 of scikit-learn."""
    from sklearn.metrics import average_precision_score, precision_recall_fscore_support

    scores, targets = _example()
    names = [f"class {index}" for index in range(CLASSES)]

    def sklearn() -> list[float]:
        predicted = scores > 0.8
        settings = {"zero_division": 0}
        mean_ap = np.mean([average_precision_score(targets[:, index], scores[:, index]) for index in range(CLASSES)])
        cp, cr, cf1, _ = precision_recall_fscore_support(targets, predicted, average="macro", **settings)
        op, orr, of1, _ = precision_recall_fscore_support(targets, predicted, average="micro", **settings)
        return [float(mean_ap), cp, cr, cf1, op, orr, of1]

    mine = ours.evaluate(scores, targets, names)
    same = [mine[name] / 100 for name in ("mAP", "CP", "CR", "CF1", "OP", "OR", "OF1")]
    if not np.allclose(same, sklearn(), rtol=0, atol=TOLERANCE):
        raise CscError(f"bench metrics: our numbers {same} differ from scikit-learn's {sklearn()}")
    best = interleaved({"ours": lambda: ours.evaluate(scores, targets, names), "sklearn": sklearn}, rounds=5)
    return [
        Result("metrics", "40,137 x 80, all metrics", best["sklearn"] / best["ours"], 3.0, "speed of scikit-learn"),
    ]


def _example() -> tuple[
    np.ndarray[tuple[int, int], np.dtype[np.float32]], np.ndarray[tuple[int, int], np.dtype[np.bool_]]
]:
    """Confidences as a trained model gives them: most near 0, positives higher."""
    rng = np.random.default_rng(0)
    targets = rng.random((IMAGES, CLASSES)) < LABELS_PER_IMAGE / CLASSES
    ranks = (rng.normal(size=(IMAGES, CLASSES)) + 1.5 * targets).argsort(axis=0).argsort(axis=0)
    return (((ranks + 0.5) / IMAGES) ** 3).astype(np.float32), targets
