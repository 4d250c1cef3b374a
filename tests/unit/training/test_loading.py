"""Batches."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from csc.data.loading import Batch, evaluation_batches, order, training_batches, workers_for
from csc.data.partial import View
from csc.errors import BadData
from csc.training import confidences
from tests.unit.training.bench import NEW, ROWS, Bench, changed, first_rows, fresh_network, one_line, settings, state_of


def load(view: View, *, seed: int = 0, epoch: int = 0, workers: int = 0, augment: bool = True) -> list[Batch]:
    return list(
        training_batches(
            view,
            size=32,
            batch_size=8,
            seed=seed,
            epochs=range(epoch, epoch + 1),
            augment=augment,
            shuffle=True,
            workers=workers,
        )
    )


def by_row(batches: list[Batch]) -> dict[int, Tensor]:
    return {int(row): image for batch in batches for row, image in zip(batch.rows, batch.images, strict=True)}


def same(one: list[Batch], two: list[Batch]) -> bool:
    pairs = list(zip(one, two, strict=True))
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) and torch.equal(a.rows, b.rows)
        for a, b in pairs
    )


def test_any_number_of_workers_gives_the_same_batches(views: dict[int, View]):
    assert same(load(views[1], workers=0), load(views[1], workers=2))


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_another_order_and_other_augmentation(views: dict[int, View], other: dict):
    first, second = load(views[1]), load(views[1], **other)
    assert same(first, load(views[1]))
    rows = [torch.cat([batch.rows for batch in batches]).tolist() for batches in (first, second)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))
    one, two = by_row(first), by_row(second)
    assert not any(torch.equal(one[row], two[row]) for row in one)


def test_without_augmentation_an_image_is_the_same_in_every_epoch(views: dict[int, View]):
    one, two = by_row(load(views[1], augment=False)), by_row(load(views[1], augment=False, epoch=5))
    assert all(torch.equal(one[row], two[row]) for row in one)


def test_several_epochs_are_those_of_each_alone(views: dict[int, View]):
    options = {"size": 32, "batch_size": 8, "seed": 0, "augment": True, "shuffle": True, "workers": 0}
    together = list(training_batches(views[1], epochs=range(1, 3), **options))
    assert same(together, load(views[1], epoch=1) + load(views[1], epoch=2))


def test_batches_are_bytes_with_the_labels_of_their_rows(views: dict[int, View]):
    for batch in load(views[2]):
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (len(batch.rows), 3, 32, 32)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert batch.targets.dtype == torch.float32
        assert np.array_equal(batch.targets.numpy(), views[2].targets()[batch.rows.numpy()])
        assert batch.targets[:, :NEW].sum() == 0


@pytest.mark.parametrize(
    ("count", "sizes"), [(17, [8, 8]), (18, [8, 8, 2]), (16, [8, 8]), (9, [8]), (8, [8]), (2, [2]), (1, [1])]
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_last_batch_of_one_image_is_left_out(count: int, sizes: list[int], shuffle: bool):
    batches = order(count, 8, seed=0, epoch=0, shuffle=shuffle)
    assert [len(rows) for rows in batches] == sizes
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(count))


def test_a_lone_last_image_does_not_stop_training(bench: Bench):
    trainer = bench.trainer(settings("train.epochs=1"), view=first_rows(bench.views[1], 9))
    assert trainer.steps == 1
    assert len(trainer.run()) == 1


def test_evaluation_reads_every_row_once_in_order(views: dict[int, View]):
    batches = list(evaluation_batches(views[1], size=32, batch_size=19, workers=0))
    assert torch.cat([batch.rows for batch in batches]).tolist() == list(range(ROWS))


def test_confidences_do_not_depend_on_the_batch_and_leave_the_network_as_it_was(views: dict[int, View]):
    config = settings()
    network = fresh_network(config).train()
    before = state_of(network)
    rows, values = zip(*confidences(network, views[1], config), strict=True)
    assert torch.cat(rows).tolist() == list(range(ROWS))
    one = next(evaluation_batches(first_rows(views[1], 1), size=32, batch_size=1, workers=0))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(values)[:1], network(one.images).sigmoid(), rtol=1e-4, atol=1e-5)
    assert torch.cat(values).shape == (ROWS, NEW)
    assert changed(before, network) == set()


def test_on_a_cpu_loading_stays_in_the_training_process_unless_told():
    assert workers_for(-1, torch.device("cpu")) == 0
    assert workers_for(3, torch.device("cpu")) == 3
    assert workers_for(-1, torch.device("cuda")) >= 1


def test_a_broken_image_is_reported_by_its_place(views: dict[int, View], tmp_path: Path):
    nowhere = dataclasses.replace(views[1], images=tmp_path)
    with pytest.raises(BadData, match=r"00000\.arrow") as error:
        load(nowhere)
    assert one_line(error)
