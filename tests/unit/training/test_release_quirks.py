"""What the released code does otherwise, and the statistical matrix."""

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from csc.errors import BadConfig, CscError
from csc.methods import registered
from csc.nets.correlation import statistical_cm
from csc.nets.head import grown_parameters
from csc.training.loop import Trainer
from csc.training.optimiser import save_moments
from tests.unit.training.bench import (
    LINEAR,
    NEW,
    ROWS,
    Bench,
    changed,
    fresh_network,
    grown_network,
    one_line,
    plain,
    settings,
    state_of,
)


@pytest.mark.parametrize("head", ["ci_gcn", "linear"])
def test_freeze_grown_layers_leaves_the_named_parameters_untouched(bench: Bench, head: str):
    config = settings(f"head={head}", "train.epochs=1")
    prior = fresh_network(config)
    network = grown_network(prior)
    grown = tuple(f"head.{name}" for name in grown_parameters(prior.head, network.head))
    before = state_of(network)
    bench.trainer(config, network, task=2, prior=prior, frozen_parameters=grown).run()
    after = changed(before, network)
    assert grown
    assert not after & set(grown)
    assert {name for name, _ in network.named_parameters()} - set(grown) <= after


def test_freezing_everything_is_refused_in_one_line(bench: Bench):
    config = settings(LINEAR, "backbone.frozen=true")
    prior = fresh_network(config)
    names = ("head.linear.weight", "head.linear.bias")
    with pytest.raises(CscError) as error:
        bench.trainer(config, grown_network(prior), task=2, prior=prior, frozen_parameters=names)
    assert one_line(error)


def test_batch_norm_keeps_its_statistics_unless_the_backbone_starts_from_scratch():
    assert settings().init == "scratch"
    assert settings().resolved_batch_norm == "live"
    assert settings("train.batch_norm=frozen_after_base").resolved_batch_norm == "frozen_after_base"
    assert settings("init=weights.safetensors").resolved_batch_norm == "frozen"
    assert settings("init=weights.safetensors", "train.batch_norm=live").resolved_batch_norm == "live"


def test_statistics_that_random_weights_do_not_have_cannot_be_kept():
    with pytest.raises(BadConfig, match="random weights have no statistics") as error:
        settings("train.batch_norm=frozen")
    assert one_line(error)


@pytest.mark.parametrize(
    ("chosen", "task", "moving"),
    [
        ("live", 2, ("backbone.", "head.")),
        ("frozen_after_base", 1, ("backbone.", "head.")),
        ("frozen_after_base", 2, ()),
        ("frozen", 1, ("head.",)),
        ("frozen", 2, ()),
    ],
)
def test_batch_norm_keeps_the_statistics_that_it_should(bench: Bench, chosen: str, task: int, moving: tuple[str, ...]):
    config = settings(f"train.batch_norm={chosen}", "init=weights.safetensors", "train.epochs=1")
    trainer = bench.trainer(config) if task == 1 else bench.second(config)
    before = state_of(trainer.network)
    trainer.run()
    after = changed(before, trainer.network)
    statistics = {name for name in before if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert "head.pooled_norm.running_mean" in statistics
    assert after & statistics == {name for name in statistics if name.startswith(moving)}
    assert any(isinstance(module, _BatchNorm) for module in trainer.network.backbone.modules())
    assert "head.W_g.weight" in after


def rows_of_each_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    objective = trainer.objective
    terms = objective.terms
    monkeypatch.setattr(
        objective, "terms", lambda batch, *more: (rows.extend(batch.rows.tolist()), terms(batch, *more))[1]
    )
    trainer.run()
    return rows


@pytest.mark.parametrize("quirk", [True, False])
def test_no_shuffle_gives_the_rows_in_order(bench: Bench, monkeypatch: pytest.MonkeyPatch, quirk: bool):
    trainer = bench.trainer(settings(LINEAR, f"release_quirks.no_shuffle={quirk}"))
    rows = rows_of_each_step(trainer, monkeypatch)
    first, second = rows[:ROWS], rows[ROWS:]
    assert sorted(first) == sorted(second) == list(range(ROWS))
    if quirk:
        assert first == second == list(range(ROWS))
    else:
        assert first != second
        assert first != list(range(ROWS))


@pytest.mark.parametrize("channels_last", ["on", "off"])
def test_persist_optimizer_hands_on_the_moments_of_parameters_that_kept_their_shape(bench: Bench, channels_last: str):
    config = settings("train.epochs=1", "release_quirks.persist_optimizer=true", f"train.channels_last={channels_last}")
    first = bench.trainer(config)
    first.run()
    path = bench.folder / "optimizer.safetensors"
    save_moments(first.optimizer, first.network, path)
    network = grown_network(first.network)
    grown = {f"head.{name}" for name in grown_parameters(first.network.head, network.head)}
    second = bench.trainer(config, network, task=2, moments=path, checkpoint_file=bench.folder / "second.safetensors")
    moments = {name: first.optimizer.state[value] for name, value in first.network.named_parameters()}
    for name, value in network.named_parameters():
        state = second.optimizer.state.get(value, {})
        if name in grown:
            assert not state, name
        else:
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}, name
            assert all(torch.equal(state[key], moments[name][key]) for key in state), name
            assert state["step"] == first.updates_per_epoch
            # The fused update walks through memory: with other strides it would pair weights with others' moments.
            assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == value.stride(), name
            assert state["exp_avg_sq"].abs().max() > 0
    second.run()
    steps = {name: second.optimizer.state[value]["step"].item() for name, value in network.named_parameters()}
    assert {steps[name] for name in grown} == {second.updates_per_epoch}
    assert {steps[name] for name in steps.keys() - grown} == {first.updates_per_epoch + second.updates_per_epoch}


def test_without_the_quirk_each_task_starts_a_fresh_optimiser(bench: Bench):
    assert not bench.second(settings()).optimizer.state


@pytest.mark.parametrize("correlation", ["Z->S", "Z->Z"])
def test_training_fills_the_statistical_matrix_from_labels_and_the_prior(bench: Bench, correlation: str):
    config = settings(f"cigcn.correlation={correlation}", "train.epochs=1")
    first = bench.trainer(config)
    first.run()
    labels = torch.from_numpy(bench.views[1].targets())
    base = first.network.head.statistical_cm
    torch.testing.assert_close(base, statistical_cm(labels))
    assert not torch.equal(base, torch.eye(NEW))

    prior = first.network.eval()
    torch.nn.init.constant_(prior.head.output.bias[2:3], 20.0)  # a prior that sees class 2 everywhere
    second = bench.trainer(
        config, grown_network(prior), task=2, prior=prior, checkpoint_file=bench.folder / "second.safetensors"
    )
    second.run()
    batch = next(plain(bench.views[2], [range(ROWS)], size=32, workers=0))
    with torch.no_grad():
        logits = prior(batch.images)
    matrix = second.network.head.statistical_cm
    torch.testing.assert_close(matrix, statistical_cm(batch.targets[:, NEW:], logits, base))
    assert torch.equal(matrix[:NEW, :NEW], base)
    assert matrix[2, NEW:].tolist() == pytest.approx([0.25] * NEW)


@pytest.mark.parametrize("method", [name for name, kind in registered().items() if "ci_gcn" in kind.heads])
def test_every_method_can_train_the_second_task_with_a_statistical_matrix(bench: Bench, method: str):
    config = settings(f"method={method}", "head=ci_gcn", "cigcn.correlation=Z->S", "train.epochs=1")
    trainer = bench.second(config, state={"fisher.head.bias": torch.zeros(NEW)} if method == "oewc" else None)
    trainer.run()
    matrix = trainer.network.head.statistical_cm
    assert matrix.shape == (2 * NEW, 2 * NEW)
    assert matrix.isfinite().all()
