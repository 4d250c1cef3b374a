"""A loss or a gradient that is not a number ends the training within its epoch."""

import pytest
import torch

from csc.errors import NotFinite
from csc.training.finite import FiniteWatch
from csc.training.loop import Trainer
from tests.unit.training.bench import Bench, one_line, settings

CONFIG = ("method=finetune", "train.epochs=2", "train.batch_size=4", "train.schedule=constant", "train.lr_base=0.002")
NAN, INF = float("nan"), float("inf")


def spoil(trainer: Trainer, update: int, what: str, factor: float) -> None:
    """Multiply the loss or the gradient of one update (from 0)."""
    updates = iter(range(1_000))

    def forward(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor | None:
        return logits * factor if next(updates) == update else None

    def backward(module: torch.nn.Module, inputs: tuple[torch.Tensor], outputs: object) -> tuple[torch.Tensor] | None:
        return (inputs[0] * factor,) if next(updates) == update else None

    if what == "loss":
        trainer.network.head.register_forward_hook(forward)
    else:
        trainer.network.head.register_full_backward_hook(backward)


@pytest.mark.parametrize("clip", ["0", "1"])
@pytest.mark.parametrize(("what", "factor"), [("loss", NAN), ("loss", INF), ("gradient", NAN), ("gradient", INF)])
def test_it_is_one_line_with_the_images_of_the_update_in_a_file(bench: Bench, what: str, factor: float, clip: str):
    reported: list[int] = []
    trainer = bench.trainer(settings(*CONFIG, f"train.clip={clip}"), on_epoch=lambda epoch, log: reported.append(epoch))
    spoil(trainer, 7, what, factor)  # the third update of the second epoch
    with pytest.raises(NotFinite) as refusal:
        trainer.run()
    listed = bench.checkpoint.with_suffix(".not-finite.txt")
    assert one_line(refusal)
    assert str(refusal.value) == (
        f"task: the {what} is not a number in epoch 2, update 3 of 5, at a learning rate of 0.002; "
        f"its images are listed in {listed}; lower train.lr_base or set train.clip=1"
    )
    rows = trainer.examples.epoch_rows(1)[2].own
    assert listed.read_text().splitlines() == bench.views[1].table["image_id"].take(rows).to_pylist()
    assert reported == [0]
    kept = bench.trainer(settings(*CONFIG, f"train.clip={clip}")).checkpoint.restore()
    assert len(kept.log) == 1  # still the last good


def test_half_precision_that_overflows_is_the_business_of_its_scaler(bench: Bench):
    trainer = bench.trainer(settings(*CONFIG, "train.amp=fp16"))
    before = trainer.precision.scaler.get_scale()
    spoil(trainer, 3, "gradient", INF)
    assert len(trainer.run()) == 2
    assert trainer.precision.scaler.get_scale() < before


def test_the_first_of_several_bad_updates_is_the_one_that_is_reported():
    watch = FiniteWatch(torch.device("cpu"), skipped=10)
    for loss, norm in ((1.0, 1.0), (1.0, NAN), (NAN, NAN), (1.0, 1.0)):
        watch.look(torch.tensor(loss), torch.tensor(norm), rate=0.1 * len(watch.rates))
    assert watch.found() == ("gradient", 11, 0.1)


def test_a_gpu_is_read_only_now_and_then():
    watch = FiniteWatch(torch.device("cpu"))
    watch.device = torch.device("cuda")
    due = []
    for _ in range(120):
        watch.look(torch.tensor(1.0), None, rate=0.1)
        due.append(watch.is_due())
    assert sum(due) == 2


def test_nothing_is_written_while_all_is_well(bench: Bench):
    bench.trainer(settings(*CONFIG)).run()
    assert list(bench.checkpoint.parent.iterdir()) == [bench.checkpoint]
