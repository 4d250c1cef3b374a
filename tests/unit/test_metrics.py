import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, precision_recall_fscore_support, roc_curve

from csc import metrics
from csc.errors import BadData

SHAPES = [(1, 1), (7, 3), (64, 20), (501, 80)]
THRESHOLDS = [0.0, 0.5, 0.8, 1.0]


def random_case(images, classes, seed, positive_rate=0.2, levels=None):
    """Scores, of so many levels only if given, and labels that leave some classes without positives in small shapes."""
    generator = np.random.default_rng(seed)
    scores = generator.random((images, classes))
    scores = scores if levels is None else np.floor(scores * levels) / levels
    return scores, generator.random((images, classes)) < positive_rate


def names(count):
    return [f"class {index}" for index in range(count)]


# ---- against scikit-learn


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("levels", [None, 20, 1], ids=["no ties", "ties", "all equal"])
def test_average_precision_equals_scikit_learn(shape, seed, levels):
    scores, targets = random_case(*shape, seed, levels=levels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of classes without positives, and gives them 0 too
        expected = [average_precision_score(targets[:, c], scores[:, c]) for c in range(shape[1])]
    np.testing.assert_allclose(metrics.average_precision(scores, targets), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("seed", range(2))
def test_precision_recall_f1_equal_scikit_learn(shape, threshold, seed):
    scores, targets = random_case(*shape, seed)
    predicted = scores > threshold
    ours = metrics.precision_recall_f1(scores, targets, threshold)
    for average, names_of in {"macro": ("CP", "CR", "CF1"), "micro": ("OP", "OR", "OF1")}.items():
        # Twice side by side, which changes no mean: scikit-learn would read a single column as a binary problem.
        wide_targets, wide_predicted = (np.hstack([part, part]) for part in (targets, predicted))
        expected = precision_recall_fscore_support(wide_targets, wide_predicted, average=average, zero_division=0)
        assert [ours[name] for name in names_of] == pytest.approx(expected[:3], abs=1e-12)


# ---- by hand


def test_images_with_equal_scores_count_together_whatever_their_order():
    scores = np.array([[0.5], [0.5], [0.5], [0.1]])
    for positive in range(3):
        targets = np.arange(4)[:, None] == positive
        assert metrics.average_precision(scores, targets) == pytest.approx([1 / 3])


def test_a_class_without_positives_has_no_average_precision_and_counts_in_the_mean():
    scores = np.array([[0.9, 0.9], [0.1, 0.8]])
    targets = np.array([[True, False], [False, False]])
    assert metrics.average_precision(scores, targets).tolist() == [1.0, 0.0]
    assert metrics.evaluate(scores, targets, ["a", "b"])["mAP"] == 50.0


def test_thresholded_metrics_by_hand():
    #                      a: TP 1, FP 1, FN 0      b: TP 1, FP 0, FN 1      c: nothing predicted, FN 1
    scores = np.array([[0.9, 0.85, 0.1], [0.95, 0.3, 0.2], [0.1, 0.8, 0.3]])
    targets = np.array([[True, True, False], [False, False, True], [False, True, False]])
    expected = {
        "CP": (1 / 2 + 1 + 0) / 3,
        "CR": (1 + 1 / 2 + 0) / 3,
        "CF1": (2 / 3 + 2 / 3 + 0) / 3,
        "OP": 2 / 3,
        "OR": 2 / 4,
        "OF1": 2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2),
    }
    assert metrics.precision_recall_f1(scores, targets) == pytest.approx(expected)


def test_cf1_is_the_mean_of_f1_and_not_the_f1_of_the_means():
    # a: P 1, R 1/2      b: P 1/2, R 1
    ours = metrics.precision_recall_f1(np.array([[0.9, 0.9], [0.1, 0.9]]), np.array([[True, True], [True, False]]))
    assert (ours["CP"], ours["CR"]) == (3 / 4, 3 / 4)
    assert round(ours["CF1"], 12) == round(2 / 3, 12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_score_equal_to_the_threshold_is_not_predicted(dtype):
    scores = np.array([[0.8]], dtype=dtype)
    assert metrics.precision_recall_f1(scores, np.array([[True]]))["OR"] == 0.0
    assert metrics.evaluate(scores, np.array([[False]]), ["a"])["FPR"] == 0.0


def test_points_of_the_roc_curve_are_those_of_scikit_learn():
    scores, targets = random_case(60, 5, seed=1, levels=30)
    points = list(zip(*metrics.roc_curve(scores, targets, points=20), strict=True))
    theirs = {cut: (fpr, tpr) for fpr, tpr, cut in zip(*roc_curve(targets.ravel(), scores.ravel()), strict=True)}
    shared = [(fpr, tpr, cut) for fpr, tpr, cut in points if cut in theirs]
    assert len(shared) > 10
    for fpr, tpr, cut in shared:
        assert (fpr, tpr) == pytest.approx(theirs[cut])


@pytest.mark.parametrize("present", [True, False])
def test_without_labels_of_both_kinds_there_is_no_roc_curve(present):
    found = metrics.roc_curve(np.full((2, 2), 0.5), np.full((2, 2), present))
    assert [part.size for part in found] == [0, 0, 0]


def test_false_positive_rate_is_over_the_absent_labels():
    scores = np.array([[0.9, 0.9, 0.1, 0.2], [0.9, 0.1, 0.1, 0.1]])
    targets = np.array([[True, False, False, False], [True, False, False, True]])
    assert metrics.false_positive_rate(scores, targets, 0.8) == pytest.approx(1 / 5)
    assert metrics.false_positive_rate(scores, np.ones_like(targets), 0.8) == 0.0


def test_entropy_sums_over_classes_and_averages_over_images():
    peak = 1 / math.e
    assert metrics.entropy(np.full((3, 20), peak)) == pytest.approx(20 / math.e, abs=2e-3)
    assert metrics.entropy(np.array([[0.5, 0.5], [0.0, 0.0]])) == pytest.approx(0.5 * -math.log(0.5 + 1e-5))
    assert metrics.entropy(np.array([[0.0, 1.0]])) == pytest.approx(0.0, abs=2e-5)


def test_calibration_error_by_hand():
    scores = np.array([[0.95, 0.05], [0.95, 0.05]])
    right = np.array([[True, False], [True, False]])
    assert metrics.expected_calibration_error(scores, right) == pytest.approx(0.05)
    assert metrics.expected_calibration_error(scores, ~right) == pytest.approx(0.95)
    half = np.array([[True, False], [False, False]])
    assert metrics.expected_calibration_error(scores, half) == pytest.approx((0.45 + 0.05) / 2)


def test_adaptive_calibration_error_looks_into_the_crowd_near_zero():
    scores = np.repeat([0.01, 0.02, 0.06], 100)[:, None]
    targets = np.concatenate([np.arange(100) < 6, np.arange(100) < 2, np.arange(100) < 1])[:, None]
    assert metrics.expected_calibration_error(scores, targets) == pytest.approx(
        0.0, abs=1e-12
    )  # they cancel in one bin
    adaptive = metrics.expected_calibration_error(scores, targets, adaptive=True)
    assert adaptive == pytest.approx((0.05 + 0.0 + 0.05) / 3)


def test_calibration_is_told_apart_for_old_and_new_classes_and_after_scaling():
    logit = np.log(0.9 / 0.1)
    scores = np.array([[1 / (1 + np.exp(-2 * logit)), 0.25]] * 100)  # of the old class twice too confident
    targets = np.stack([np.arange(100) < 90, np.arange(100) < 25], axis=1)
    found = metrics.calibration_errors(scores, targets, 1, temperature=2.0)
    assert found["ECE_old"] == pytest.approx(scores[0, 0] - 0.9)
    assert found["ECE_new"] == pytest.approx(0.0, abs=1e-9)
    assert found["ECE_old_T"] == pytest.approx(0.0, abs=1e-6)
    assert found["ECE_new_T"] > 0.05
    assert found["ECE"] == pytest.approx((found["ECE_old"] + found["ECE_new"]) / 2)
    assert metrics.calibration_errors(scores, targets, 0)["AECE_old"] == 0.0


def test_scaling_by_1_changes_nothing_and_keeps_the_ends_finite():
    scores = np.array([0.0, 1e-6, 0.3, 0.999, 1.0], np.float32)
    np.testing.assert_allclose(metrics.scaled(scores, 1.0), scores, atol=1e-7)
    assert np.all((metrics.scaled(scores, 0.2) >= 0) & (metrics.scaled(scores, 0.2) <= 1))


def test_f1_at_the_models_own_thresholds_stands_next_to_the_papers():
    scores, targets = np.array([[0.6, 0.7], [0.2, 0.9]]), np.array([[True, False], [False, True]])
    found = metrics.evaluate(scores, targets, ["a", "b"], thresholds={"a": 0.5})
    assert (found["CF1"], found["CF1_own"], found["OF1_own"]) == (50.0, 100.0, 100.0)  # b has the threshold of all, 0.8


def test_confidence_histogram_closes_the_last_bin():
    scores, targets = np.array([[0.0, 0.1, 0.8, 1.0]]), np.array([[False, False, True, True]])
    confidence = metrics.evaluate(scores, targets, list("abcd"))["confidence"]
    assert confidence["positives"] == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert confidence["negatives"] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_forgetting_counts_only_classes_of_earlier_tasks():
    assert metrics.forgetting({"a": 90.0, "b": 50.0}, {"a": 60.0, "b": 55.0, "c": 10.0}) == pytest.approx(12.5)
    assert metrics.forgetting({}, {"a": 60.0}) == 0.0


def test_best_average_precision_is_carried_from_task_to_task():
    scores, targets = np.array([[0.9, 0.2], [0.8, 0.3]]), np.array([[False, False], [True, True]])
    task = metrics.evaluate(scores, targets, ["a", "b"], best_ap={"a": 80.0})
    assert task["AP"] == {"a": 50.0, "b": 100.0}
    assert task["forgetting"] == 30.0
    assert task["best_AP"] == {"a": 80.0, "b": 100.0}


def test_summary_averages_over_all_tasks_and_takes_the_last():
    history = [{"mAP": m, "CF1": m - 1, "OF1": m - 2, "forgetting": 100 - m} for m in (90.0, 80.0, 40.0)]
    assert metrics.summary(history) == {
        "avg_mAP": 70.0,
        "last_mAP": 40.0,
        "last_CF1": 39.0,
        "last_OF1": 38.0,
        "forgetting": 60.0,
    }
    with pytest.raises(BadData, match="at least one"):
        metrics.summary([])


# ---- properties

cases = st.builds(
    random_case,
    images=st.integers(1, 30),
    classes=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    positive_rate=st.floats(0, 1),
)


def flat_numbers(value):
    if isinstance(value, dict):
        return [number for part in value.values() for number in flat_numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in flat_numbers(part)]
    return [value]


@given(case=cases, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_the_order_of_images_does_not_matter(case, seed):
    scores, targets = case
    order = np.random.default_rng(seed).permutation(len(scores))
    one, other = (metrics.evaluate(s, t, names(s.shape[1])) for s, t in (case, (scores[order], targets[order])))
    assert flat_numbers(one) == pytest.approx(flat_numbers(other), abs=1e-9)


@given(case=cases)
@settings(max_examples=50, deadline=None)
def test_a_perfect_ranking_gives_100_and_confident_ones_every_label(case):
    noise, targets = case
    targets[0] = True
    scores = 0.9 * targets + 0.1 * noise
    perfect = metrics.evaluate(scores, targets, names(scores.shape[1]))
    assert perfect["mAP"] == pytest.approx(100, abs=1e-9)
    assert [perfect[name] for name in ("CF1", "OF1", "CP", "CR", "OP", "OR")] == pytest.approx([100] * 6)
    assert perfect["FPR"] == 0


@given(case=cases, power=st.floats(0.2, 3))
@settings(max_examples=50, deadline=None)
def test_average_precision_depends_only_on_the_ranking(case, power):
    scores, targets = case
    spread = np.linspace(0.01, 1, len(scores))[np.argsort(np.argsort(scores, axis=0), axis=0)]
    np.testing.assert_allclose(
        metrics.average_precision(spread**power, targets), metrics.average_precision(scores, targets), atol=1e-12
    )


@given(case=cases, threshold=st.floats(0, 1), constant=st.sampled_from([None, 0.0, 0.8, 1.0]))
@settings(max_examples=80, deadline=None)
def test_every_number_is_finite_plain_and_in_range(case, threshold, constant):
    scores, targets = case
    if constant is not None:
        scores = np.full_like(scores, constant)
    result = metrics.evaluate(scores.astype(np.float32), targets, names(scores.shape[1]), threshold)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {type(number) for number in flat_numbers(result)} <= {int, float}
    for name in ("mAP", "CF1", "OF1", "CP", "CR", "OP", "OR", "FPR", "ECE"):
        assert 0 <= result[name] <= 100 + 1e-9
    assert -1.01e-5 * scores.shape[1] <= result["H"] <= scores.shape[1] / math.e
    confidence = result["confidence"]
    assert sum(confidence["positives"]) == targets.sum()
    assert sum(confidence["positives"]) + sum(confidence["negatives"]) == targets.size
    assert len(confidence["edges"]) == len(confidence["positives"]) + 1
    assert result["images"] == len(scores)


@given(case=cases)
@settings(max_examples=50, deadline=None)
def test_inputs_are_left_untouched(case):
    scores, targets = case
    before = scores.copy(), targets.copy()
    metrics.evaluate(scores, targets, names(scores.shape[1]))
    assert np.array_equal(scores, before[0])
    assert np.array_equal(targets, before[1])


# ---- bad inputs

GOOD = np.array([[0.1, 0.9], [0.2, 0.3]])
LABELS = np.array([[False, True], [True, False]])


@pytest.mark.parametrize(
    ("scores", "targets", "classes", "best_ap", "message"),
    [
        (np.where(LABELS, np.nan, GOOD), LABELS, ["a", "b"], {}, r"2 scores .* nan \(row 0, class b\)"),
        (np.where(LABELS, np.inf, GOOD), LABELS, ["a", "b"], {}, "inf"),
        (GOOD - 0.5, LABELS, ["a", "b"], {}, "between 0 and 1"),
        (GOOD, LABELS[:1], ["a", "b"], {}, "same shape"),
        (GOOD[0], LABELS[0], ["a", "b"], {}, "same shape"),
        (GOOD[:0], LABELS[:0], ["a", "b"], {}, "nothing to evaluate"),
        (GOOD, LABELS, ["a"], {}, "2 columns"),
        (GOOD, LABELS, ["a", "a"], {}, "different class names"),
        (GOOD, LABELS.astype(np.int8), ["a", "b"], {}, "booleans"),
        (GOOD, LABELS, ["a", "b"], {"c": 50.0}, "not evaluated: c"),
    ],
)
def test_bad_inputs_are_refused_in_one_line(scores, targets, classes, best_ap, message):
    with pytest.raises(BadData, match=message) as caught:
        metrics.evaluate(scores, targets, classes, best_ap=best_ap)
    assert "\n" not in str(caught.value)
