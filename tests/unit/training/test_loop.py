"""The loop that trains one task, and its optimiser."""

import math

import pytest
import torch
from torch import Tensor

from csc.errors import BadData
from csc.methods import build_head, registered
from csc.nets.backbone import build_backbone
from csc.nets.network import Network
from csc.training.checkpoint import EpochLog
from csc.training.loop import Trainer
from csc.training.start import seed_everything
from tests.unit.training.bench import (
    LINEAR,
    NEW,
    ROWS,
    Bench,
    changed,
    first_rows,
    fresh_network,
    grown_network,
    plain,
    settings,
    state_of,
)

MEASURED = {"loss", "images_per_second", "waiting"}


@pytest.mark.parametrize("method", ["csc", "lwf", "finetune", "joint"])
def test_a_method_trains_both_tasks_and_logs_its_terms(bench: Bench, method: str):
    config = settings(f"method={method}", "max_entropy.beta=0.1", "train.epochs=1")
    first = bench.trainer(config).run()
    assert set(first[0]) == {"ce"} | MEASURED
    bench.checkpoint.unlink()
    second = bench.second(config).run()
    own = {"ce", "kd"} if registered()[method].needs_prior else {"ce"}
    assert set(second[0]) == {*own, "H"} | MEASURED
    for epoch in first + second:
        assert all(math.isfinite(value) for value in epoch.values())
        assert epoch["loss"] == pytest.approx(sum(epoch[name] for name in epoch.keys() - MEASURED))
        assert epoch["images_per_second"] > 0
        assert 0 < epoch["waiting"] < 1


def test_training_logs_each_epoch_once_and_learns(bench: Bench):
    reported: list[tuple[int, EpochLog]] = []
    config = settings("train.epochs=4", "train.lr_base=0.01", "train.schedule=constant")
    log = bench.trainer(config, on_epoch=lambda epoch, entry: reported.append((epoch, entry))).run()
    assert reported == list(enumerate(log))
    assert len(log) == 4
    assert log[-1]["ce"] < log[0]["ce"]


def test_the_same_seed_gives_bitwise_equal_weights_and_another_seed_others(bench: Bench):
    def train(seed: int, path: str) -> dict[str, Tensor]:
        config = settings(f"seed={seed}", "input.augment=true", "train.epochs=1")
        seed_everything(config.seed, 1)
        backbone = build_backbone(config.backbone)
        network = Network(backbone, build_head(config, backbone.channels, (NEW,)), (0.5,) * 3, (0.25,) * 3)
        bench.trainer(config, network, checkpoint_file=bench.folder / path).run()
        return state_of(network)

    one, two, other = train(3, "one.safetensors"), train(3, "two.safetensors"), train(4, "other.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    weights = [name for name, value in one.items() if value.ndim > 1]
    assert not any(torch.equal(one[name], other[name]) for name in weights)


@pytest.mark.parametrize("head", ["ci_gcn", "linear"])
def test_vectors_and_biases_do_not_decay_and_all_else_does(bench: Bench, head: str):
    trainer = bench.trainer(settings(f"head={head}", "train.weight_decay=0.01"))
    names = {id(value): name for name, value in trainer.network.named_parameters()}
    decay: dict[str, float] = {}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in decay
            decay[names[id(parameter)]] = group["weight_decay"]
    assert set(decay) == set(names.values())
    for name, value in trainer.network.named_parameters():
        assert decay[name] == (0 if value.ndim == 1 or name.endswith(".bias") else 0.01), name
    assert set(decay.values()) == {0, 0.01}


def learning_rates(trainer: Trainer) -> list[tuple[float, float]]:
    """(backbone, head) rates of each step."""
    names = {id(value): name for name, value in trainer.network.named_parameters()}
    rates: list[tuple[float, float]] = []

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        of = {names[id(group["params"][0])].split(".")[0]: group["lr"] for group in optimizer.param_groups}
        rates.append((of["backbone"], of["head"]))

    trainer.optimizer.register_step_pre_hook(record)
    trainer.run()
    return rates


RATES = ("train.lr_base=0.004", "train.lr=0.001", "train.backbone_lr_scale=0.5", "train.batch_size=4", LINEAR)


@pytest.mark.parametrize(("task", "peak"), [(1, 0.004), (2, 0.001)])
def test_one_cycle_peaks_at_the_rate_of_the_task(bench: Bench, task: int, peak: float):
    config = settings(*RATES, "train.schedule=onecycle")
    rates = learning_rates(bench.trainer(config) if task == 1 else bench.second(config))
    head = [rate for _, rate in rates]
    assert len(head) == 2 * ROWS // 4
    assert head[0] == pytest.approx(peak / 25)
    assert head[1] == max(head) == pytest.approx(peak)  # after a fifth of ten steps
    assert head[-1] == pytest.approx(peak / 25 / 1e4)
    assert [rate for rate, _ in rates] == pytest.approx([0.5 * rate for rate in head])


@pytest.mark.parametrize(("task", "rate"), [(1, 0.004), (2, 0.001)])
def test_a_constant_rate_stays(bench: Bench, task: int, rate: float):
    config = settings(*RATES, "train.schedule=constant", "train.epochs=1")
    rates = learning_rates(bench.trainer(config) if task == 1 else bench.second(config))
    assert rates == [(0.5 * rate, rate)] * (ROWS // 4)


@pytest.mark.parametrize(
    ("steps", "pct_start"), [(1, 0.2), (2, 0.5), (3, 0.0), (3, 1.0), (4, 0.2), (4, 0.25), (5, 0.2)]
)
def test_any_number_of_steps_can_be_scheduled(bench: Bench, steps: int, pct_start: float):
    config = settings(LINEAR, f"train.epochs={steps}", f"train.pct_start={pct_start}")
    log = bench.trainer(config, view=first_rows(bench.views[1], 2)).run()
    assert len(log) == steps


def test_a_task_of_one_image_is_refused(bench: Bench):
    with pytest.raises(BadData, match="one training image"):
        bench.trainer(settings("train.epochs=2"), view=first_rows(bench.views[1], 1))


@pytest.mark.parametrize(("head", "frozen"), [("ci_gcn", "true"), ("linear", "true"), ("ci_gcn", "after_base")])
def test_a_frozen_backbone_keeps_weights_and_statistics_while_the_head_learns(bench: Bench, head: str, frozen: str):
    trainer = bench.second(settings(f"head={head}", f"backbone.frozen={frozen}", "train.epochs=1"))
    before = state_of(trainer.network)
    log = trainer.run()
    after = changed(before, trainer.network)
    assert after
    assert all(name.startswith("head.") for name in after)
    assert {f"head.{name}" for name, _ in trainer.network.head.named_parameters()} <= after
    assert log[0]["kd"] > 0


@pytest.mark.parametrize("frozen", ["false", "after_base"])
def test_a_backbone_that_is_not_frozen_yet_learns_weights_and_statistics(bench: Bench, frozen: str):
    trainer = bench.trainer(settings(f"backbone.frozen={frozen}", "train.epochs=1"))
    before = state_of(trainer.network)
    trainer.run()
    of_backbone = {name for name in changed(before, trainer.network) if name.startswith("backbone.")}
    assert any(name.endswith("running_mean") for name in of_backbone)
    assert any(name.endswith("weight") for name in of_backbone)


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_the_prior_never_changes_and_answers_in_eval_mode(bench: Bench, frozen: str):
    config = settings(f"backbone.frozen={frozen}", "train.epochs=1")
    prior = fresh_network(config).train()
    trainer = bench.trainer(config, grown_network(prior), task=2, prior=prior)
    before, of_teacher = state_of(prior), state_of(trainer.prior)
    modes: set[bool] = set()
    trainer.prior.head.register_forward_hook(lambda module, *_: modes.add(module.training))
    trainer.run()
    assert changed(before, prior) == changed(of_teacher, trainer.prior) == set()
    assert modes == {False}
    assert not any(module.training for module in trainer.prior.modules())
    assert all(not value.requires_grad and value.grad is None for value in trainer.prior.parameters())


@pytest.mark.parametrize("frozen", ["true", "false"])
def test_distillation_compares_with_the_prior_on_the_same_images(bench: Bench, frozen: str):
    """At the first step of a task, all old logits of a linear head agree with the prior's in eval mode."""
    config = settings(
        "method=lwf",
        "loss.alpha=0",
        "train.batch_size=20",
        "train.epochs=1",
        "train.batch_norm=frozen_after_base",
        f"backbone.frozen={frozen}",
    )
    trainer = bench.second(config)
    with torch.no_grad():
        for network in (trainer.network, trainer.prior):
            network.head.linear.weight[:NEW] *= 50  # so that images differ in their logits
    log = trainer.run()
    batch = next(plain(bench.views[2], [range(ROWS)], size=32, workers=0))
    with torch.no_grad():
        p = trainer.prior(batch.images).sigmoid()
    lowest = -(p * p.log() + (1 - p) * (1 - p).log()).mean()  # cross-entropy with itself
    assert p.std(dim=0).min() > 0.01
    assert log[0]["kd"] == pytest.approx(lowest.item(), rel=1e-4)
