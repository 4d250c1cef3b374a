"""How a step is computed must not change what is learned: batches in parts, half precision, compiled networks."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from csc.data.loading import Batch
from csc.replay.memory import Memory
from csc.replay.update import update
from csc.scenario import Task
from csc.training.checkpoint import Checkpoint, EpochLog, ResumePoint
from csc.training.device import Precision
from csc.training.loop import Trainer
from csc.training.optimiser import laid_out_like
from tests.unit.training.bench import ROWS, Bench, changed, settings, state_of, without_speed

STILL = ("train.batch_norm=frozen_after_base", "release_quirks.no_shuffle=true", "train.schedule=constant")


def first_update(trainer: Trainer) -> tuple[EpochLog, Tensor]:
    """The log of an epoch that is one update, and the gradient that the optimiser got."""
    gradients: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *rest: object) -> None:
        values = (value for group in optimizer.param_groups for value in group["params"] if value.grad is not None)
        gradients.append(torch.cat([value.grad.flatten() for value in values]))

    trainer.optimizer.register_step_pre_hook(keep)
    (log,) = without_speed(trainer.run())
    (gradient,) = gradients
    return log, gradient


def assert_same_update(bench: Bench, rows: int, *items: str, **more: object) -> None:
    """An epoch in parts of 8 images and one in a single batch: what Adam makes of their rounding is another matter."""

    def learned(name: str, *parts: str) -> tuple[EpochLog, Tensor]:
        config = settings("train.epochs=1", *STILL, *items, *parts)
        return first_update(bench.second(config, checkpoint_file=bench.folder / name, **more))

    whole, gradient = learned("whole", f"train.batch_size={rows}")
    parts, accumulated = learned("parts", "train.batch_size=8", f"train.accumulate={-(-rows // 8)}")
    assert whole == pytest.approx(parts, rel=1e-4, abs=1e-5)
    assert (gradient - accumulated).norm() < 1e-3 * gradient.norm()


@pytest.mark.parametrize("form", ["bce", "asl"])
@pytest.mark.parametrize("method", ["csc", "podnet", "krt"])
def test_a_batch_in_parts_is_the_whole_batch(bench: Bench, method: str, form: str):
    # At first learner and prior are the same, so the direction of a distance between them is rounding alone.
    near = ["podnet.spatial=0"] if method == "podnet" else []
    assert_same_update(bench, ROWS, f"method={method}", f"loss.form={form}", "memory.sampler=none", *near)


@pytest.mark.parametrize("form", ["bce", "asl"])
@pytest.mark.parametrize("method", ["csc", "er", "krt", "agcn-r"])
def test_so_it_is_with_exemplars_whose_unknown_labels_are_masked(
    bench: Bench, tasks: tuple[Task, ...], method: str, form: str
):
    """The parts know different numbers of labels: the first show the task's images, the last its exemplars."""
    remembers = ("memory.sampler=random", "memory.per_class=2", "memory.replay=concat", "memory.unknown=masked")
    config = settings(f"method={method}", *remembers)
    empty = Memory.empty(bench.views[1].fingerprint)
    kept = update(
        empty, bench.views[1], tasks[0], config.memory, seed=0, features=lambda: np.zeros((0, 0)), logits=None
    )
    memory = kept.extended_to(bench.views[2], tasks[1], config.memory.labels)
    rows = ROWS + len(memory)
    assert rows % 8 > 1  # the last part is smaller, too
    assert_same_update(bench, rows, f"method={method}", f"loss.form={form}", *remembers, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "items",
    [
        ("train.amp=bf16",),
        ("train.amp=fp16", "train.clip=1"),
        ("train.amp=fp16", "train.accumulate=2"),
        ("train.compile=true",),
    ],
)
def test_a_run_that_dies_goes_on_in_its_precision(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, items: tuple[str, ...]
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # needs no C++ compiler
    config = settings(*items, "train.epochs=3")
    whole = bench.second(config, checkpoint_file=bench.folder / "whole").run()
    assert whole[-1]["ce"] < whole[0]["ce"]

    def dies(epoch: int, log: EpochLog) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.second(config, on_epoch=dies).run()
    assert without_speed(bench.second(config).run()) == without_speed(whole)


def test_half_precision_is_scaled_and_a_step_that_overflows_is_left_out(bench: Bench):
    trainer = bench.trainer(settings("train.amp=fp16"))
    assert trainer.precision.scaler.is_enabled()
    before = trainer.precision.scaler.get_scale()
    trainer.network.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * float("inf"),))
    before_step = state_of(trainer.network.backbone)
    _one_update(trainer)
    assert trainer.precision.scaler.get_scale() < before
    assert not any(name.endswith("weight") for name in changed(before_step, trainer.network.backbone))


def _one_update(trainer: Trainer) -> None:
    trainer._train_mode()
    trainer._update(trainer.examples.batches(range(1)), trainer.examples.epoch_rows(0)[:1])


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpu_that_only_emulates_bfloat16_takes_float16(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: torch.dtype
):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    assert Precision.of(settings(), torch.device("cuda")).autocast.fast_dtype == expected


def test_a_checkpoint_of_a_machine_that_scales_nothing_is_taken_up_where_scaling_is_needed(bench: Bench):
    network = nn.Linear(2, 1)
    parts = bench.folder / "any", "key", network, torch.optim.Adam(network.parameters()), None
    Checkpoint(*parts, torch.amp.GradScaler("cpu", enabled=False)).save(ResumePoint([{"loss": 1.0}]))
    assert Checkpoint(*parts, torch.amp.GradScaler("cpu")).restore() == ResumePoint([{"loss": 1.0}])


def test_a_checkpoint_of_another_lineage_is_not_resumed(bench: Bench):
    config = settings("train.epochs=1")
    reported: list[int] = []

    def train(lineage: str) -> None:
        bench.trainer(config, lineage=lineage, on_epoch=lambda epoch, log: reported.append(epoch)).run()

    train("weights")
    train("weights")
    assert reported == [0]
    train("other weights")
    assert reported == [0, 0]


def test_what_a_step_needs_moves_to_the_device_together():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    batch = Batch(images, torch.zeros(2, 5), torch.arange(2)).to(torch.device("meta"))
    assert {part.device.type for part in (batch.images, batch.targets, batch.rows)} == {"meta"}


def test_an_inherited_count_of_steps_lies_where_its_parameter_does():
    parameter = torch.empty(3, device="meta")
    assert laid_out_like(parameter, torch.tensor(7.0)).device.type == "meta"
