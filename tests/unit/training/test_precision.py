"""How a step is computed must not change what is learned: batches in parts, half precision, compiled networks."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from csc.data.loading import Batch
from csc.training.checkpoint import Checkpoint
from csc.training.device import Precision
from csc.training.loop import EpochLog, Trainer
from csc.training.optimiser import laid_out_like
from tests.unit.training.bench import ROWS, Bench, changed, first_rows, settings, state_of, without_speed

STILL = ("release_quirks.freeze_bn_after_base=true", "release_quirks.no_shuffle=true", "train.schedule=constant")


@pytest.mark.parametrize("form", ["bce", "asl"])
@pytest.mark.parametrize("method", ["csc", "podnet", "krt"])
def test_a_batch_in_parts_is_the_whole_batch(bench: Bench, method: str, form: str):
    """The same first epoch and the same gradient; what Adam makes of its rounding is another matter."""

    def learned(name: str, *items: str) -> tuple[EpochLog, Tensor]:
        # At first learner and prior are the same, so the direction of a distance between them is rounding alone.
        near = ["podnet.spatial=0"] if method == "podnet" else []
        wanted = (
            f"method={method}",
            f"loss.form={form}",
            "memory.sampler=none",
            "train.epochs=1",
            *near,
            *STILL,
            *items,
        )
        view, gradients = first_rows(bench.views[2], ROWS), []
        trainer = bench.second(settings(*wanted), view=view, checkpoint=bench.folder / name)

        def keep(optimizer: torch.optim.Optimizer, *rest: object) -> None:
            values = (value for group in optimizer.param_groups for value in group["params"] if value.grad is not None)
            gradients.append(torch.cat([value.grad.flatten() for value in values]))

        trainer.optimizer.register_step_pre_hook(keep)
        (log,) = without_speed(trainer.run())
        (gradient,) = gradients
        return log, gradient

    whole, gradient = learned("whole", f"train.batch_size={ROWS}")
    parts, accumulated = learned("parts", "train.batch_size=8", "train.accumulate=3")  # 8, 8 and 4 images
    assert whole == pytest.approx(parts, rel=1e-4, abs=1e-5)
    assert (gradient - accumulated).norm() < 1e-3 * gradient.norm()


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
    whole = bench.second(config, checkpoint=bench.folder / "whole").run()
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
    _one_step(trainer)
    assert trainer.precision.scaler.get_scale() < before
    assert not any(name.endswith("weight") for name in changed(before_step, trainer.network.backbone))


def _one_step(trainer: Trainer) -> None:
    trainer._train_mode()
    size = len(trainer.examples.order(0)[0][0].rows)
    trainer._step(trainer.examples.batches(range(1)), [[size]])


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
    Checkpoint(*parts, torch.amp.GradScaler("cpu", enabled=False)).save([{"loss": 1.0}])
    assert Checkpoint(*parts, torch.amp.GradScaler("cpu")).restore() == [{"loss": 1.0}]


def test_a_checkpoint_of_another_origin_is_not_taken_up(bench: Bench):
    config = settings("train.epochs=1")
    told: list[int] = []

    def train(origin: str) -> None:
        bench.trainer(config, origin=origin, on_epoch=lambda epoch, log: told.append(epoch)).run()

    train("weights")
    train("weights")
    assert told == [0]
    train("other weights")
    assert told == [0, 0]


def test_what_a_step_needs_moves_to_the_device_together():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    batch = Batch(images, torch.zeros(2, 5), torch.arange(2)).to(torch.device("meta"))
    assert {part.device.type for part in (batch.images, batch.targets, batch.rows)} == {"meta"}


def test_an_inherited_count_of_steps_lies_where_its_parameter_does():
    parameter = torch.empty(3, device="meta")
    assert laid_out_like(parameter, torch.tensor(7.0)).device.type == "meta"
