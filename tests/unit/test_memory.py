import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.config.groups import MemorySettings
from csc.data.views import View
from csc.errors import BadModel
from csc.replay.memory import Memory, joined
from csc.replay.samplers import Balance, admission, herding, leaving, ocdm, prs, reservoir, shares
from csc.replay.update import update
from csc.scenario import Task

SAMPLERS = ("herding", "random", "reservoir", "prs", "ocdm")
STREAMS = ("reservoir", "prs", "ocdm")
WORLD = "the data set"


def tasks(*sizes: int) -> list[Task]:
    """Tasks of so many new classes each."""
    names = tuple(f"class{index:02d}" for index in range(sum(sizes)))
    ends = np.cumsum(sizes).tolist()
    return [
        Task(index, len(sizes), names[end - size : end], names[:end])
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True), start=1)
    ]


def train_view(truth: Sequence[set[int]], task: Task) -> View:
    """What a task may see of images of which the truth is known; image number and position are those in the truth."""
    new = range(len(task.old), len(task.seen))
    rows = [row for row, labels in enumerate(truth) if labels & set(new)]
    return run_status({f"image-{row}": sorted(truth[row] & set(new)) for row in rows}, task)


def run_status(labels: dict[str, list[int]], task: Task) -> View:
    row = pa.array([int(name.rpartition("-")[2]) for name in labels], pa.int32())
    table = pa.table(
        {
            "image_id": pa.array(list(labels), pa.string()),
            "shard": pa.array([number.as_py() // 7 for number in row], pa.int32()),
            "row": row,
            "labels": pa.array(list(labels.values()), pa.list_(pa.int16())),
        }
    )
    return View(table, task.seen, "somewhere", WORLD)


def features_of(view: View) -> np.ndarray[Any, Any]:
    numbers = view.table["row"].to_pylist()
    return np.stack([np.random.default_rng(number).normal(1, 1, 8) for number in numbers]).astype(np.float32)


def settled(sampler: str, **more: Any) -> MemorySettings:
    return MemorySettings(sampler=sampler, **more)  # type: ignore[arg-type]


def lived(
    truth: Sequence[set[int]], life: Sequence[Task], settings: MemorySettings, seed: int = 0, *, logits: bool = False
) -> Memory:
    """The memory after all tasks."""
    memory = Memory.empty(WORLD)
    for task in life:
        view = train_view(truth, task)
        memory = update(
            memory,
            view,
            task,
            settings,
            seed=seed,
            features=lambda view=view: features_of(view),
            logits=(lambda rows, task=task: np.full((len(rows), len(task.seen)), task.index)) if logits else None,
        )
    return memory


def ids(memory: Memory) -> list[str]:
    return list(memory.table["image_id"].to_pylist())


def assert_same(one: Memory, other: Memory) -> None:
    assert one.table.equals(other.table)
    assert (one.seen, one.classes, one.fingerprint) == (other.seen, other.classes, other.fingerprint)
    for name in ("labels", "known", "owner", "rank", "logits", "stored", "counts"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, err_msg=name)


def random_truth(images: int, classes: int, seed: int = 0) -> list[set[int]]:
    rng = np.random.default_rng(seed)
    return [set(np.flatnonzero(rng.random(classes) < 0.3).tolist()) for _ in range(images)]


def long_tail(images: int, classes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Labels of which the first class has many times as many as the last."""
    often = 0.8 / np.arange(1, classes + 1) ** 1.2
    labels: np.ndarray[Any, Any] = np.random.default_rng(seed).random((images, classes)) < often
    return labels[labels.any(axis=1)]


def divergence(labels: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    """KL(class distribution of the images ‖ target), by its definition."""
    parts = labels.sum(axis=0) / labels.sum()
    return float(sum(part * np.log(part / aim) for part, aim in zip(parts, target, strict=True) if part > 0))


# Herding


def naive_herding(features: np.ndarray[Any, Any], k: int) -> list[int]:
    D = [row / np.sqrt((row**2).sum()) for row in features]
    mu = sum(D) / len(D)
    w, taken = mu, []
    for _ in range(1000):
        if len(taken) == min(k, len(D)):
            break
        pick = int(np.argmax([w @ d for d in D]))
        if pick not in taken:
            taken.append(pick)
        w = w + mu - D[pick]
    return taken


@pytest.mark.parametrize(("images", "k"), [(1, 1), (30, 1), (30, 10), (30, 30), (12, 40), (200, 20)])
@pytest.mark.parametrize("seed", range(5))
def test_herding_is_what_it_says(images: int, k: int, seed: int):
    features = np.random.default_rng(seed).normal(0.5, 1, (images, 6))
    assert herding(features, k).tolist() == naive_herding(features, k)


def test_herding_repairs_the_mean_instead_of_taking_the_nearest():
    angles = np.radians([0, 40, 100])  # the mean lies at 44 degrees: 1 is nearest, then 0, then 2
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert herding(features, 3).tolist() == [1, 2, 0]
    assert herding(features, 2).tolist() == [1, 2]
    assert herding(features * np.array([[5.0], [0.1], [30.0]]), 3).tolist() == [1, 2, 0]


def test_herding_does_not_go_on_for_ever():
    features = np.tile(np.array([[1.0, 2.0]], np.float32), (20, 1))  # all the same: the first is picked each time
    assert herding(features, 5).tolist()[0] == 0
    assert herding(np.zeros((3, 2), np.float32), 2).tolist()[0] == 0
    assert herding(features, 0).tolist() == herding(features[:0], 5).tolist() == []


# Streams


def test_every_image_of_the_stream_has_the_same_chance_in_a_reservoir():
    slots, parts, tries = 5, (3, 9, 8), 4000
    images = sum(parts)
    hits = np.zeros(images)
    for seed in range(tries):
        rng = np.random.default_rng(seed)
        memory, seen = np.empty(0, np.intp), 0
        for part in parts:
            both = np.concatenate([memory, np.arange(seen, seen + part)])
            memory, seen = both[reservoir(len(memory), part, seen, slots, rng)], seen + part
        assert len(set(memory.tolist())) == slots
        hits[memory] += 1
    expected = tries * slots / images
    assert ((hits - expected) ** 2 / expected).sum() < 36  # 19 degrees of freedom, 1 %


def test_shares_follow_the_counts_by_a_power():
    counts = np.array([16, 4, 0, 1])
    np.testing.assert_allclose(shares(counts, 0), [1 / 3, 1 / 3, 0, 1 / 3])
    np.testing.assert_allclose(shares(counts, 1), [16 / 21, 4 / 21, 0, 1 / 21])
    np.testing.assert_allclose(shares(counts, -0.5), np.array([1 / 4, 1 / 2, 0, 1]) / 1.75)


def test_the_chance_to_enter_is_that_of_the_rarest_labels():
    counts = np.array([[100, 98, 2], [100, 99, 2], [100, 99, 3]])
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1]], dtype=bool)
    chances = 6 / 3 / counts  # M π_j / n_j, with ρ = 0
    weight = 1 / (1 + np.exp(-2))  # softmax of (-100, -98), the second
    expected = [weight * chances[0, 1] + (1 - weight) * chances[0, 0], chances[1, 0], chances[2, 2]]
    np.testing.assert_allclose(admission(labels, counts, 6, 0.0), expected)
    assert admission(labels[2:], counts[2:], 60, 0.0) == pytest.approx(1)


def test_the_image_that_leaves_is_the_best_missed_of_the_largest_class():
    stored = np.zeros((61, 3), dtype=bool)
    stored[:60, 0] = True  # class 0 is far over its share, so that the draw is certain
    stored[:59, 1] = True  # class 1 is over its share too
    stored[:58, 2] = True
    stored[60, 2] = True
    target = np.array([0.2, 0.2, 0.6])  # only class 2 is short: 59 of 178
    # Of class 0, images 58 and 59 have no label that is short. Without 58, classes 0 and 1 both come nearer.
    assert {leaving(stored, target, np.random.default_rng(seed)) for seed in range(20)} == {58}


def test_an_image_with_a_class_that_is_short_stays_though_the_balance_were_better_without():
    stored = np.zeros((162, 5), dtype=bool)
    stored[0] = True  # would be the best missed: four of its classes are over their shares
    stored[1:101, 0] = True
    for column in (1, 2, 3):
        stored[101 + 20 * (column - 1) : 101 + 20 * column, column] = True
    stored[161, 1] = True
    target = np.array([0.2, 0.1, 0.1, 0.1, 0.5])
    assert all(1 <= leaving(stored, target, np.random.default_rng(seed)) < 101 for seed in range(20))


def test_prs_of_one_class_is_a_reservoir():
    labels, early = np.ones((160, 1), dtype=bool), []
    for seed in range(300):
        kept = prs(labels[:0], labels, np.array([0]), 10, 0.0, np.random.default_rng(seed))
        assert len(set(kept.tolist())) == 10
        early.append(np.mean(kept < 80))
    assert np.mean(early) == pytest.approx(0.5, abs=0.04)


def test_the_class_to_leave_is_drawn_by_its_excess():
    stored = np.zeros((7, 2), dtype=bool)
    stored[:4, 0] = True
    stored[4:, 1] = True
    target = np.array([0.5, 0.5])  # δ = (0.5, -0.5): class 0 with probability σ(1)
    drawn = [leaving(stored, target, np.random.default_rng(seed)) < 4 for seed in range(2000)]
    assert np.mean(drawn) == pytest.approx(1 / (1 + np.exp(-1)), abs=0.03)


def test_a_class_with_nothing_stored_cannot_leave():
    stored = np.array([[True, False]])
    for seed in range(20):
        assert leaving(stored, np.array([1.0, 0.0]), np.random.default_rng(seed)) == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_divergence_without_an_image_is_that_of_the_others(seed: int):
    rng = np.random.default_rng(seed)
    labels = rng.random((15, 6)) < 0.3
    labels[np.arange(15), rng.integers(0, 5, 15)] = True
    labels[:, 5] = False  # a class that was seen and is not stored
    target = shares(np.array([1, 5, 2, 7, 3, 9]), 0.5)
    balance = Balance(labels, target)
    left = list(range(15))
    for _ in range(10):
        expected = np.full(15, np.inf)
        for image in left:
            expected[image] = divergence(labels[[other for other in left if other != image]], target)
        np.testing.assert_allclose(balance.without(), expected, rtol=1e-9, atol=1e-12)
        dropped = int(rng.choice(left))
        balance.drop(dropped)
        left.remove(dropped)
    assert np.flatnonzero(balance.left).tolist() == left


def test_ocdm_drops_what_there_is_too_much_of():
    labels = np.eye(3, dtype=bool)[[0, 0, 1, 2]]
    kept = ocdm(labels[:3], labels[3:], np.array([2, 1, 0]), 3, 0.0)
    assert sorted(labels[kept].argmax(axis=1).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_prs_and_ocdm_come_nearer_to_their_target_than_a_reservoir(rho: float):
    labels = long_tail(3000, 12)
    nothing, counts, target = labels[:0], np.zeros(12, np.int64), shares(labels.sum(axis=0), rho)
    rng = np.random.default_rng(0)
    far = divergence(labels[reservoir(0, len(labels), 0, 100, rng)], target)
    assert divergence(labels[prs(nothing, labels, counts, 100, rho, rng)], target) < far / 2
    assert divergence(labels[ocdm(nothing, labels, counts, 100, rho)], target) < far / 20


@pytest.mark.parametrize("sampler", STREAMS)
def test_a_stream_that_goes_on_keeps_something_of_its_beginning(sampler: str):
    memory = lived(random_truth(200, 6), tasks(2, 2, 2), settled(sampler, total=30))
    assert len(memory) == 30
    assert set(memory.known[:, 0].tolist()) == {0, 2, 4}
    assert (memory.owner == -1).all()


def test_prs_does_not_drop_a_class_that_only_exemplars_have_shown():
    held, arriving = np.eye(2, dtype=bool)[[0, 0, 0, 1]], np.eye(2, dtype=bool)[[0] * 50]
    counts = np.array([10, 0])  # an exemplar was taught class 1 before the stream brought it
    stays = [3 in prs(held, arriving, counts, 4, 0.0, np.random.default_rng(seed)) for seed in range(100)]
    assert np.mean(stays) > 0.4


# By class


@pytest.mark.parametrize("sampler", ["herding", "random"])
def test_a_total_is_split_among_the_classes_and_old_ones_are_cut_by_rank(sampler: str):
    truth, life = random_truth(300, 6), tasks(2, 1, 3)
    memory = Memory.empty(WORLD)
    for task, k in zip(life, (20, 14, 7), strict=True):  # 40 in 2, 3 and 6 parts, rounded up
        before, view = memory, train_view(truth, task)
        memory = update(memory, view, task, settled(sampler, total=40), seed=3, features=lambda v=view: features_of(v))
        for owner in range(len(task.seen)):
            mine = memory.owner == owner
            assert memory.rank[mine].tolist() == list(range(k))
            assert memory.labels[mine, owner].all()
        for owner in range(len(task.old)):
            images = np.array(ids(before))[before.owner == owner]
            assert np.array(ids(memory))[memory.owner == owner].tolist() == images[:k].tolist()


def test_herding_orders_the_images_of_a_class():
    (task,) = tasks(2)
    view = train_view(random_truth(50, 2), task)
    features = features_of(view)
    memory = update(Memory.empty(WORLD), view, task, settled("herding", per_class=5), seed=0, features=lambda: features)
    for owner in range(2):
        rows = np.flatnonzero(view.targets()[:, owner])
        expected = view.table["image_id"].take(pa.array(rows[herding(features[rows], 5)])).to_pylist()
        assert np.array(ids(memory))[memory.owner == owner].tolist() == expected


@pytest.mark.parametrize("sampler", ["herding", "random"])
def test_an_image_is_stored_once_if_asked(sampler: str):
    truth, life = random_truth(80, 4), tasks(2, 2)
    twice = lived(truth, life, settled(sampler, per_class=12))
    once = lived(truth, life, settled(sampler, per_class=12, unique=True))
    assert len(set(ids(twice))) < len(ids(twice)) == 4 * 12
    assert len(set(ids(once))) == len(ids(once)) < 4 * 12
    # Dropped after the choice: what is left are the first ones of the same choices, with the same owners and ranks.
    entries = set(zip(ids(twice), twice.owner.tolist(), twice.rank.tolist(), strict=True))
    assert set(zip(ids(once), once.owner.tolist(), once.rank.tolist(), strict=True)) <= entries
    assert set(ids(once)) == set(ids(twice))


def test_only_herding_asks_for_features():
    def refuse() -> np.ndarray[Any, Any]:
        raise AssertionError("features were computed for nothing")

    (task,) = tasks(3)
    view = train_view(random_truth(30, 3), task)
    for sampler in ("random", *STREAMS):
        assert len(update(Memory.empty(WORLD), view, task, settled(sampler, total=6), seed=0, features=refuse)) == 6


# All samplers


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_memory(sampler: str):
    truth, life = random_truth(120, 6), tasks(2, 2, 2)
    settings = settled(sampler, total=18)
    assert_same(lived(truth, life, settings, seed=1), lived(truth, life, settings, seed=1))
    if sampler != "herding":
        assert ids(lived(truth, life, settings, seed=1)) != ids(lived(truth, life, settings, seed=2))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_logits_are_stored_once_and_never_refreshed(sampler: str):
    asked: list[list[int]] = []

    def logits(rows: Sequence[int]) -> np.ndarray[Any, Any]:
        asked.append(list(rows))
        return said(rows)

    def said(rows: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.asarray(rows)[:, None] + 0.5 + np.arange(len(task.seen))

    truth, memory = random_truth(60, 4), Memory.empty(WORLD)
    for task in tasks(2, 2):
        before, view = memory, train_view(truth, task)
        asked.clear()
        memory = update(
            memory,
            view,
            task,
            settled(sampler, total=12),
            seed=0,
            features=lambda view=view: features_of(view),
            logits=logits,
        )
        (rows,) = asked
        new = np.flatnonzero(memory.known[:, 0] == len(task.old))
        assert new.tolist() == list(range(len(memory) - len(rows), len(memory)))
        assert view.table["image_id"].take(pa.array(rows)).to_pylist() == ids(memory)[new[0] :]
        np.testing.assert_array_equal(memory.logits[new], said(rows))
        assert (memory.stored[new] == len(task.seen)).all()
    old = np.flatnonzero(memory.known[:, 0] == 0)
    was = [ids(before).index(name) for name in ids(memory)[: len(old)]]
    assert len(was) > 0
    np.testing.assert_array_equal(memory.logits[old], np.pad(before.logits[was], ((0, 0), (0, 2))))
    assert (memory.stored[old] == 2).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_without_a_visible_label_is_not_kept(sampler: str):
    (task,) = tasks(2)
    view = run_status({"image-0": [0], "image-1": [], "image-2": [1], "image-3": []}, task)
    memory = update(
        Memory.empty(WORLD), view, task, settled(sampler, total=10), seed=0, features=lambda: features_of(view)
    )
    assert set(ids(memory)) <= {"image-0", "image-2"}
    assert (memory.counts.tolist(), memory.seen) == ([1, 1], 2)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_labels_of_old_classes_are_not_stored_even_if_the_view_shows_them(sampler: str):
    second = tasks(2, 2)[1]
    view = run_status({"image-0": [0, 2], "image-1": [1, 2, 3], "image-2": [0, 1]}, second)
    memory = update(
        Memory.empty(WORLD), view, second, settled(sampler, total=8), seed=0, features=lambda: features_of(view)
    )
    assert set(ids(memory)) == {"image-0", "image-1"}
    assert not memory.labels[:, :2].any()
    assert memory.counts.tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_smaller_budget_than_before_is_kept_too(sampler: str):
    truth, (first, second) = random_truth(80, 4), tasks(2, 2)
    memory = lived(truth, [first], settled(sampler, total=40))
    view = train_view(truth, second)
    memory = update(memory, view, second, settled(sampler, total=8), seed=0, features=lambda: features_of(view))
    assert len(memory) == 8


truths = st.lists(st.sets(st.integers(0, 6), max_size=4), min_size=8, max_size=40).filter(
    lambda truth: all(any(labels & part for labels in truth) for part in ({0, 1, 2}, {3, 4}, {5, 6}))
)


@settings(deadline=None)
@given(
    truth=truths,
    sampler=st.sampled_from(SAMPLERS),
    size=st.integers(1, 25),
    by_class=st.booleans(),
    unique=st.booleans(),
    scope=st.sampled_from(["own_task", "own_to_current"]),
    rho=st.sampled_from([0.0, -0.03, 0.5]),
    seed=st.integers(0, 1 << 32),
)
def test_a_memory_keeps_its_size_and_knows_only_what_it_was_shown(
    truth: list[set[int]],
    sampler: str,
    size: int,
    by_class: bool,
    unique: bool,
    scope: str,
    rho: float,
    seed: int,
):
    by_class = by_class and sampler not in STREAMS
    budget = {"per_class": size} if by_class else {"total": size}
    kept = settled(sampler, unique=unique, labels=scope, rho=rho, **budget)
    memory, arrived = Memory.empty(WORLD), 0
    for task in tasks(3, 2, 2):
        view = train_view(truth, task)
        memory = update(memory, view, task, kept, seed=seed, features=lambda view=view: features_of(view))
        arrived += len(view)
        n = len(task.seen)
        most = size if sampler in STREAMS else n * (size if by_class else -(-size // n))
        assert 0 < len(memory) <= most
        assert not unique or len(set(ids(memory))) == len(memory)
        assert memory.seen == arrived
        assert not (memory.labels & ~memory.known_mask()).any()
        for row, (first, last), labels in zip(
            memory.table["row"].to_pylist(), memory.known.tolist(), memory.labels, strict=True
        ):
            assert set(np.flatnonzero(labels).tolist()) == truth[row] & set(range(first, last))
            assert last == (n if scope == "own_to_current" else {0: 3, 3: 5, 5: 7}[first])


# Labels of exemplars


def taught_once(scope: str) -> tuple[Memory, View]:
    """Three exemplars of a first task, taught a second one in which two of them have something new."""
    first, second = tasks(2, 2)
    truth: list[set[int]] = [{0, 2}, {1}, {0, 1, 3}, {2, 3}]
    memory = lived(truth, [first], settled("reservoir", total=3))
    view = train_view(truth, second)
    return memory.extended_to(view, second, scope), view  # type: ignore[arg-type]


def test_exemplars_keep_the_labels_of_their_own_task():
    memory, _ = taught_once("own_task")
    assert dict(zip(ids(memory), memory.labels.astype(int).tolist(), strict=True)) == {
        "image-0": [1, 0, 0, 0],
        "image-1": [0, 1, 0, 0],
        "image-2": [1, 1, 0, 0],
    }
    assert memory.known.tolist() == [[0, 2]] * 3
    assert memory.known_mask().astype(int).tolist() == [[1, 1, 0, 0]] * 3


def test_exemplars_learn_the_labels_of_later_tasks_from_their_views():
    memory, _ = taught_once("own_to_current")
    assert dict(zip(ids(memory), memory.labels.astype(int).tolist(), strict=True)) == {
        "image-0": [1, 0, 1, 0],
        "image-1": [0, 1, 0, 0],
        "image-2": [1, 1, 0, 1],
    }
    assert memory.known.tolist() == [[0, 4]] * 3
    assert memory.known_mask().all()


@pytest.mark.parametrize("scope", ["own_task", "own_to_current"])
def test_teaching_twice_changes_nothing(scope: str):
    memory, view = taught_once(scope)
    assert_same(memory.extended_to(view, tasks(2, 2)[1], scope), memory)  # type: ignore[arg-type]


def test_an_exemplar_that_missed_a_task_does_not_pretend_to_know_it():
    truth, (first, second, third) = random_truth(40, 6), tasks(2, 2, 2)
    memory = lived(truth, [first, second], settled("random", per_class=3, labels="own_task"))
    taught = memory.extended_to(train_view(truth, third), third, "own_to_current")
    assert set(map(tuple, taught.known.tolist())) == {(0, 2), (2, 6)}


def test_a_memory_of_another_data_set_is_refused():
    first, second = tasks(2, 2)
    truth = random_truth(30, 4)
    memory = replace(lived(truth, [first], settled("random", per_class=2)), fingerprint="another")
    with pytest.raises(BadModel, match="is of the data set another, the train view of task 2 is of the data set"):
        memory.extended_to(train_view(truth, second), second, "own_task")


def test_a_memory_of_another_task_is_refused():
    first, _, third = tasks(2, 2, 2)
    truth = random_truth(30, 6)
    memory = lived(truth, [first], settled("random", per_class=2))
    with pytest.raises(BadModel, match=r"has 2 classes \(class00 to class01\), task 3 needs .* 4 classes"):
        memory.extended_to(train_view(truth, third), third, "own_task")


def test_views_with_exemplars_are_views(tmp_path: Path):
    memory, view = taught_once("own_to_current")
    view.write(tmp_path / "train.parquet")
    for task_view in (view, View.read(tmp_path / "train.parquet")):
        both = joined(task_view, memory)
        assert both.table.schema.equals(task_view.table.schema, check_metadata=True)
        assert (both.classes, both.shards_uri, both.fingerprint) == (view.classes, "somewhere", WORLD)
        np.testing.assert_array_equal(both.targets(), np.concatenate([view.targets(), memory.labels]))
        both.write(tmp_path / "both.parquet")
        np.testing.assert_array_equal(View.read(tmp_path / "both.parquet").targets(), both.targets())
        assert both.table["image_id"].to_pylist() == [*view.table["image_id"].to_pylist(), *ids(memory)]
        assert both.table["shard"].to_pylist()[len(view) :] == memory.table["shard"].to_pylist()
    alone = memory.view(view)
    np.testing.assert_array_equal(alone.targets(), memory.labels)
    assert len(joined(view, Memory.empty(WORLD))) == len(view)


# The file


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_memory_comes_back_as_it_was(sampler: str, logits: bool, tmp_path: Path):
    memory = lived(random_truth(60, 4), tasks(2, 2), settled(sampler, total=14), logits=logits)
    memory.write(tmp_path / "memory.parquet")
    again = Memory.read(tmp_path / "memory.parquet")
    assert_same(again, memory)
    again.write(tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "memory.parquet").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"memory.parquet", "again.parquet"}


def test_an_empty_memory_comes_back_and_can_be_taught(tmp_path: Path):
    Memory.empty(WORLD).write(tmp_path / "memory.parquet")
    memory = Memory.read(tmp_path / "memory.parquet")
    assert_same(memory, Memory.empty(WORLD))
    first = tasks(2, 2)[0]
    taught = memory.extended_to(train_view(random_truth(9, 4), first), first, "own_to_current")
    assert (len(taught), taught.labels.shape, taught.classes) == (0, (0, 2), first.seen)


def test_a_memory_goes_on_from_its_file_as_from_itself(tmp_path: Path):
    truth, (first, second) = random_truth(60, 4), tasks(2, 2)
    settings = settled("prs", total=10)
    memory = lived(truth, [first], settings)
    memory.write(tmp_path / "memory.parquet")
    view = train_view(truth, second)
    went_on = [
        update(before, view, second, settings, seed=0, features=lambda: features_of(view))
        for before in (memory, Memory.read(tmp_path / "memory.parquet"))
    ]
    assert_same(*went_on)


def rewritten(path: Path, column: str | None = None, values: Any = None, **facts: Any) -> None:
    """Change a column or the facts of a memory's file."""
    table = pq.ParquetFile(path).read()
    known = json.loads(table.schema.metadata[b"csc"]) | facts
    if column is not None:
        index = table.schema.get_field_index(column)
        table = table.set_column(index, column, pa.array(values, table.schema.field(column).type))
    pq.write_table(table.replace_schema_metadata({b"csc": json.dumps(known)}), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_text("not parquet"),
        lambda path: pq.write_table(pa.table({"image_id": ["a"]}), path),
        lambda path: taught_once("own_task")[1].write(path),
        lambda path: pq.write_table(pq.ParquetFile(path).read().replace_schema_metadata(None), path),
        lambda path: rewritten(path, classes=["a"]),
        lambda path: rewritten(path, counts=[1]),
        lambda path: rewritten(path, counts="many"),
        lambda path: rewritten(path, "labels", [[0], [1], [7]]),
        lambda path: (
            taught_once("own_to_current")[0].write(path),
            rewritten(path, "labels", [[0], [1], [-1]]),
        ),
        lambda path: rewritten(path, "labels", [[0], [1], None]),
        lambda path: rewritten(path, "labels", [[0], [1], [3]]),  # a class of the second task
        lambda path: rewritten(path, "last", [2, 2, 9]),
        lambda path: rewritten(path, "logits", [[], [], [0.0] * 5]),
    ],
)
def test_a_file_that_is_no_memory_is_refused_in_one_line(change: Any, tmp_path: Path):
    path = tmp_path / "memory.parquet"
    taught_once("own_task")[0].write(path)
    Memory.read(path)
    change(path)
    with pytest.raises(BadModel, match=r"memory\.parquet: not the memory of a model") as caught:
        Memory.read(path)
    assert "\n" not in str(caught.value)


def test_a_memory_needs_neither_torch_nor_pandas():
    code = "import sys, csc.replay.update; print(*({'torch', 'pandas'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
