"""Temperature and thresholds of a model: fitted on training images alone, carried from task to task."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import f1_score

from csc.model import ModelCard, read_card, save_network
from csc.scenario import Task
from csc.training import calibration
from csc.training.calibration import GRID, best_thresholds, calibrate, fit_temperature
from tests.unit.training.bench import NEW, Bench, card_of, fresh_network, saved_model, settings, state_of

LWF = "method=lwf"


def labelled(images: int, seed: int = 0, sharpness: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels that are as frequent as logits / sharpness say."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(-1, 2, (images, 3))
    return logits * sharpness, generator.random(logits.shape) < 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_the_temperature_has_the_least_cross_entropy(sharpness: float):
    logits, targets = labelled(2000, sharpness=sharpness)
    found = minimize_scalar(lambda t: np.mean(np.logaddexp(0, logits / t) - targets * logits / t), bounds=(0.2, 5))
    assert fit_temperature(logits, targets) == pytest.approx(found.x, rel=1e-3)
    assert fit_temperature(logits, targets) == pytest.approx(sharpness, rel=0.1)


def test_the_temperature_stays_in_bounds_where_labels_say_nothing():
    logits, targets = labelled(20)
    assert fit_temperature(logits, logits > 0) == pytest.approx(0.2, abs=1e-3)  # learned by heart
    assert fit_temperature(logits, logits < 0) == pytest.approx(5.0, abs=1e-3)
    assert fit_temperature(logits, np.zeros_like(targets)) == 1.0


def test_a_threshold_is_the_highest_whose_f1_is_within_two_points_of_the_best():
    logits, targets = labelled(300)
    confidences = 1 / (1 + np.exp(-logits))
    for column, chosen in enumerate(best_thresholds(confidences, targets)):
        f1 = [f1_score(targets[:, column], confidences[:, column] > threshold) for threshold in GRID]
        assert chosen == GRID[np.flatnonzero(np.array(f1) >= max(f1) - 0.02)[-1]]


@pytest.fixture
def first(bench: Bench, tasks: tuple[Task, ...], tmp_path: Path) -> Path:
    """The model of the first task, with its calibration."""
    config = settings(LWF)
    network = fresh_network(config)
    fitted = calibrate(bench.trainer(config, network).objective, None)
    card: ModelCard = dataclasses.replace(card_of(config, tasks[0]), calibration=fitted)
    (tmp_path / "first").mkdir()
    save_network(network, card, tmp_path / "first")
    return tmp_path / "first"


def test_a_base_model_has_a_threshold_for_each_class_and_keeps_its_weights(first: Path, bench: Bench):
    card = read_card(first)
    assert list(card.thresholds) == list(card.classes)
    assert set(card.thresholds.values()) <= set(GRID)
    network = fresh_network(settings(LWF))
    before, state = state_of(network), torch.get_rng_state()
    again = calibrate(bench.trainer(settings(LWF), network).objective, None)
    assert again == card.calibration
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_old_classes_are_called_where_the_model_before_called_them(first: Path, bench: Bench, monkeypatch):
    before = read_card(first).thresholds
    same = bench.second(settings(LWF))  # its old outputs are those of the model before, until it is trained
    after = calibrate(same.objective, first)
    assert list(after["thresholds"]) == [*before, *same.objective.classes[NEW:]]
    monkeypatch.setattr(calibration, "_SLACK", 0.0)
    confidences = same.objective.logits(range(same.objective.examples.task_rows)).sigmoid().numpy()[:, :NEW]
    exact = calibrate(same.objective, first)["thresholds"]
    for column, (name, threshold) in enumerate(before.items()):
        called = confidences[:, column] > threshold
        if called.any():
            np.testing.assert_array_equal(confidences[:, column] > exact[name], called)
        else:
            assert exact[name] == threshold


def test_a_method_without_a_prior_has_its_old_thresholds_too(bench: Bench, tasks: tuple[Task, ...], tmp_path: Path):
    config = settings("method=finetune")
    prior = saved_model(tmp_path / "prior", config, tasks[0])  # of a version without calibration: 0.8 for all
    assert set(read_card(prior).thresholds.values()) == {0.8}
    assert len(calibrate(bench.second(config).objective, prior)["thresholds"]) == 2 * NEW


def test_no_more_than_so_many_images_are_looked_at(bench: Bench, monkeypatch):
    monkeypatch.setattr(calibration, "MOST_IMAGES", 5)
    objective = bench.trainer(settings()).objective
    looked_at = []
    monkeypatch.setattr(objective, "logits", lambda rows: looked_at.append(rows) or torch.zeros(len(rows), NEW))
    calibrate(objective, None)
    assert len(looked_at[0]) == 5
