"""Learning methods: what each loss is, and which logits each of its terms may touch."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import csc.config
from csc.config import base_method, resolve
from csc.methods import build_method, register, registered
from csc.methods.base import LossInputs, Replay
from csc.methods.losses import asymmetric_loss, binary_cross_entropy, max_entropy
from csc.methods.lwf import LwF

BATCH, OLD, NEW = 4, 3, 2
N = OLD + NEW
METHODS = sorted(csc.config.methods())
DESCENDING = [name for name in METHODS if not registered()[base_method(name)].solves]
DISTILLING = [name for name in METHODS if issubclass(registered()[base_method(name)], LwF)]


def random_step(*, old: int = OLD, seed: int = 0, seen_labels: bool = False) -> LossInputs:
    """A batch with moderate logits; labels of old classes are invisible unless asked for."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(BATCH, old + NEW, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 2, (BATCH, old + NEW), generator=generator).double()
    if not seen_labels:
        targets[:, :old] = 0
    prior = torch.randn(BATCH, old, generator=generator, dtype=torch.float64) if old else None
    return LossInputs(logits, targets, NEW, prior)


def build(name: str, **settings):
    return build_method(resolve("voc", {"method": name, **settings}))


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def total(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def bce_by_loops(logits: list[list[float]], targets: list[list[float]]) -> float:
    values = []
    for row, wanted in zip(logits, targets, strict=True):
        for z, y in zip(row, wanted, strict=True):
            p = sigmoid(z)
            values.append(-(y * math.log(p) + (1 - y) * math.log(1 - p)))
    return sum(values) / len(values)


def asl_by_loops(logits: list[list[float]], targets: list[list[float]]) -> float:
    """Fact sheet 1.8: γ₊ = 0, γ₋ = 4, m = 0.05, log clamped at 1e-8, summed."""
    loss = 0.0
    for row, wanted in zip(logits, targets, strict=True):
        for z, y in zip(row, wanted, strict=True):
            p = sigmoid(z)
            p_m = max(p - 0.05, 0)
            loss -= y * (1 - p) ** 0 * math.log(max(p, 1e-8))
            loss -= (1 - y) * p_m**4 * math.log(max(1 - p_m, 1e-8))
    return loss


def entropy_by_loops(logits: list[list[float]]) -> float:
    """Fact sheet 2.3: mean over images of the sum over classes of -p ln(p + 1e-5)."""
    per_image = [sum(-sigmoid(z) * math.log(sigmoid(z) + 1e-5) for z in row) for row in logits]
    return sum(per_image) / len(per_image)


# The terms of each method on one batch, with the settings of VOC: a change of them is a change of the method.
REVIEWED = {
    "agcn": {"ce": 0.096188, "kd": 0.721299, "relations": 0.01628},
    "agcn-r": {"ce": 0.087592, "kd": 0.71458, "relations": 0.01628},
    "csc": {"ce": 0.096188, "kd": 0.721299, "H": -0.036893},
    "csc-r": {"ce": 0.096188, "kd": 0.721299, "replay": 0.415214, "H": -0.036893},
    "derpp": {"ce": 8.264899, "logits": 3.274375, "replay": 3.705485},
    "er": {"ce": 8.264899},
    "finetune": {"ce": 8.264899},
    "joint": {"ce": 8.264899},
    "krt": {"ce": 9.622554, "tokens": 205.928625},
    "krt-r": {"ce": 9.622554, "tokens": 205.928625},
    "l2p": {"ce": 0.641253, "pull": -0.162801},
    "lwf": {"ce": 0.096188, "kd": 0.721299},
    "ocdm": {"ce": 8.264899, "replay": 7.363966},
    "oewc": {"ce": 8.264899},
    "podnet": {"ce": 8.264899, "spatial": 12.870539, "flat": 225.192677},
    "prs": {"ce": 8.264899, "replay": 7.363966},
}
DISTANCES = {"agcn": ["relations"], "krt": ["tokens"], "podnet": ["spatial", "flat"], "l2p": ["pull"]}


@pytest.mark.parametrize("name", DESCENDING)
def test_the_terms_of_a_method_are_those_that_were_reviewed(name: str):
    built, generator = build(name), torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def marks() -> Tensor:
        return torch.randint(0, 2, (4, 5), generator=generator).bool()

    logits, targets, prior, known = numbers(4, 5), marks().double(), numbers(4, 3), marks()
    known[:, 3:] = True
    distances = {key: numbers(4).square() for key in DISTANCES.get(name.removesuffix("-r"), ())}
    replays = tuple(
        Replay(numbers(4, 5), marks().double(), marks(), numbers(4, 5), marks()) for _ in range(built.replay_batches)
    )
    memory = built.config.memory
    drawn, mixed = memory.sampler != "none" and memory.replay == "batch", memory.sampler != "none"
    step = LossInputs(
        logits, targets, 2, prior, known if mixed and not drawn else None, distances, replays if drawn else ()
    )
    assert {key: float(value) for key, value in built.loss(step).items()} == pytest.approx(REVIEWED[name], abs=1e-5)


# Registry


def test_registry_and_settings_name_the_same_methods():
    assert set(registered()) == {base_method(name) for name in METHODS}
    assert len(METHODS) == 18


@pytest.mark.parametrize("name", METHODS)
def test_a_configuration_builds_the_method_it_names(name: str):
    built = build(name)
    assert type(built) is registered()[base_method(name)]
    assert built.name == base_method(name)
    assert csc.config.methods()[name]


def test_a_name_is_registered_once_only():
    with pytest.raises(ValueError, match="'csc' is registered twice"):
        register(registered()["csc"])


# Loss functions


def test_binary_cross_entropy_is_the_mean_of_the_formula_for_hard_and_soft_targets():
    step = random_step()
    for targets in (step.targets, torch.rand(BATCH, N, dtype=torch.float64)):
        expected = bce_by_loops(step.logits.tolist(), targets.tolist())
        assert binary_cross_entropy(step.logits, targets).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("spread", [1, 6, 30], ids=["moderate", "wide", "saturated"])
def test_asymmetric_loss_equals_its_formula_in_loops(spread: float):
    step = random_step()
    logits = spread * step.logits.detach()
    expected = asl_by_loops(logits.tolist(), step.targets.tolist())
    assert asymmetric_loss(logits, step.targets).item() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert torch.isfinite(asymmetric_loss(logits.float(), step.targets.float()))


def test_asymmetric_loss_has_no_gradient_through_the_focusing_weight():
    step = random_step()
    p = step.logits.sigmoid()
    p_m = (p - 0.05).clamp(min=0)

    def loss(weight: Tensor) -> Tensor:
        return -(step.targets * p.log() + (1 - step.targets) * weight * (1 - p_m).log()).sum()

    got = gradient(asymmetric_loss(step.logits, step.targets), step.logits)
    detached = gradient(loss((p_m**4).detach()), step.logits)
    through = gradient(loss(p_m**4), step.logits)
    torch.testing.assert_close(got, detached, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(got, through, atol=1e-3)


def test_asymmetric_loss_forgets_easy_negatives_and_never_explodes():
    logits = torch.tensor([[-5.0, -40.0, 40.0]], requires_grad=True)  # p = 0.007, 0, 1: all absent
    slope = gradient(asymmetric_loss(logits, torch.zeros(1, 3)), logits)
    assert torch.equal(slope[0, :2], torch.zeros(2))
    assert slope.isfinite().all()
    far = torch.tensor([[-40.0]], requires_grad=True)
    assert asymmetric_loss(far, torch.ones(1, 1)).detach().item() == pytest.approx(-math.log(1e-8), rel=1e-5)


def test_max_entropy_is_the_mean_over_images_of_the_sum_over_classes():
    logits = random_step().logits.detach()
    assert max_entropy(logits).item() == pytest.approx(entropy_by_loops(logits.tolist()), abs=1e-9)
    assert (max_entropy(logits, reduction="mean")).item() == pytest.approx(
        entropy_by_loops(logits.tolist()) / N, abs=1e-9
    )


def test_one_sided_entropy_is_largest_where_p_is_one_over_e():
    p = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    values = torch.stack([max_entropy(z.view(1, 1)) for z in p.logit()])
    assert p[values.argmax()].item() == pytest.approx(1 / math.e, abs=2e-3)
    assert values.max().item() == pytest.approx(1 / math.e, abs=1e-4)


@pytest.mark.parametrize(
    ("form", "p", "direction"),
    [
        ("one_sided", 0.9, -1),
        ("one_sided", 0.5, -1),
        ("one_sided", 0.05, 1),
        ("binary", 0.9, -1),
        ("binary", 0.45, 1),
        ("binary", 0.05, 1),
    ],
)
def test_entropy_pulls_confident_predictions_down_and_tiny_ones_up(form: str, p: float, direction: int):
    logit = torch.tensor([[p]], dtype=torch.float64).logit().requires_grad_()
    loss = -max_entropy(logit, form)  # what training minimises
    step_of_descent = -gradient(loss, logit)
    assert torch.sign(step_of_descent).item() == direction


@pytest.mark.parametrize("p", [0.01, 0.2, 0.4])
def test_binary_entropy_is_symmetric_about_one_half(p: float):
    low, high = (torch.tensor([[value]], dtype=torch.float64).logit() for value in (p, 1 - p))
    half = torch.zeros(1, 1, dtype=torch.float64)
    assert max_entropy(low, "binary").item() == pytest.approx(max_entropy(high, "binary").item(), abs=1e-9)
    assert max_entropy(low, "binary") < max_entropy(half, "binary")
    assert max_entropy(half, "binary").item() == pytest.approx(math.log(2), abs=1e-4)
    assert abs((max_entropy(low) - max_entropy(high)).item()) > 1e-3


@pytest.mark.parametrize("form", ["one_sided", "binary"])
def test_entropy_and_its_gradient_are_finite_at_saturated_logits(form: str):
    logits = torch.tensor([[-200.0, 200.0]], requires_grad=True)
    value = max_entropy(logits, form)
    assert value.isfinite()
    assert gradient(value, logits).isfinite().all()


# CSC


@pytest.mark.parametrize("seed", range(3))
def test_csc_is_alpha_ce_plus_rest_kd_minus_beta_h(seed: int):
    alpha, beta = 0.3, 0.07
    step = random_step(seed=seed)
    terms = build("csc", loss={"alpha": alpha}, max_entropy={"beta": beta}).loss(step)
    logits, targets, prior = step.logits.tolist(), step.targets.tolist(), step.prior_logits.tolist()
    ce = bce_by_loops([row[OLD:] for row in logits], [row[OLD:] for row in targets])
    kd = bce_by_loops([row[:OLD] for row in logits], [[sigmoid(z) for z in row] for row in prior])
    h = entropy_by_loops([row[:OLD] for row in logits])
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(
        {"ce": alpha * ce, "kd": (1 - alpha) * kd, "H": -beta * h}, abs=1e-6
    )
    assert total(terms).item() == pytest.approx(alpha * ce + (1 - alpha) * kd - beta * h, abs=1e-6)


def test_alpha_and_beta_may_follow_the_number_of_old_classes():
    step, ratio = random_step(), OLD / NEW
    plain = build("csc", loss={"alpha": 0.5}, max_entropy={"beta": 0.1}).loss(step)
    powers = {"loss": {"alpha": 0.5, "alpha_power": -1.0}, "max_entropy": {"beta": 0.1, "beta_power": 2.0}}
    scheduled = build("csc", **powers).loss(step)
    factors = {name: (scheduled[name] / plain[name]).item() for name in plain}
    assert factors["ce"] / factors["kd"] == pytest.approx(1 / ratio)
    assert factors["ce"] + factors["kd"] == pytest.approx(2)
    assert factors["H"] == pytest.approx(ratio**2)


def test_logit_adjustment_adds_the_log_odds_of_new_classes_in_ce_alone():
    step = random_step()
    shares = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.2], dtype=torch.float64)
    labels = (torch.arange(10).unsqueeze(1) < 10 * shares).double()
    adjusted = build("csc", loss={"alpha": 1.0, "logit_adjustment": 2.0})
    adjusted.begin(SimpleNamespace(labels=lambda: labels, new=NEW, device=torch.device("cpu")))
    shift = torch.tensor([0.0, 2 * math.log(0.2 / 0.8)])
    expected = bce_by_loops((step.logits[:, OLD:] + shift).tolist(), step.targets[:, OLD:].tolist())
    assert adjusted.terms(step)["ce"].item() == pytest.approx(expected)
    assert adjusted.loss(step)["H"] == build("csc").loss(step)["H"]


def test_the_presets_give_csc_the_weights_of_the_paper():
    assert [resolve(name).loss.alpha for name in ("voc", "coco")] == [0.15, 0.15]
    assert [resolve(name).max_entropy.beta for name in ("voc", "coco")] == [4e-2, 4e-3]
    assert resolve("voc").head == "ci_gcn"


@pytest.mark.parametrize("name", DISTILLING)
def test_the_base_task_is_ce_alone_without_alpha(name: str):
    step = random_step(old=0)
    terms = build(name, loss={"alpha": 0.15}, max_entropy={"beta": 0.1}).loss(step)
    assert list(terms) == ["ce"]
    expected = bce_by_loops(step.logits.tolist(), step.targets.tolist())
    assert terms["ce"].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", DISTILLING)
def test_distillation_has_no_gradient_where_the_prior_already_agrees(name: str):
    step = random_step()
    same = LossInputs(step.logits, step.targets, NEW, step.logits[:, :OLD].detach().clone())
    agreeing = gradient(build(name).terms(same)["kd"], step.logits)
    assert agreeing.abs().max() < 1e-12
    assert gradient(build(name).terms(step)["kd"], step.logits)[:, :OLD].abs().min() > 1e-6


@pytest.mark.parametrize("name", DISTILLING)
def test_ce_never_touches_old_logits_and_kd_never_new_ones(name: str):
    step = random_step()
    terms = build(name).terms(step)
    of_ce = gradient(terms["ce"], step.logits)
    of_kd = gradient(build(name).terms(step)["kd"], step.logits)
    assert torch.equal(of_ce[:, :OLD], torch.zeros_like(of_ce[:, :OLD]))
    assert of_ce[:, OLD:].abs().min() > 0
    assert torch.equal(of_kd[:, OLD:], torch.zeros_like(of_kd[:, OLD:]))
    assert of_kd[:, :OLD].abs().max() > 0


@pytest.mark.parametrize("name", DISTILLING)
@pytest.mark.parametrize("policy", ["masked", "negative"])
def test_old_labels_of_another_kind_replace_distillation(name: str, policy: str):
    step = random_step()
    terms = build(name, loss={"old_labels": policy}).terms(step)
    assert list(terms) == ["ce"]
    slope = gradient(terms["ce"], step.logits)[:, :OLD]
    if policy == "masked":
        assert torch.equal(slope, torch.zeros_like(slope))
    else:
        assert slope.min() > 0


# Bounds: fine-tuning and joint training


@pytest.mark.parametrize("form", ["bce", "asl"])
def test_fine_tuning_pushes_every_old_logit_down(form: str):
    step = random_step()
    loss = build("finetune", loss={"form": form}).terms(step)["ce"]
    slope = gradient(loss, step.logits)
    assert step.logits.sigmoid().min() > 0.05  # below it, the asymmetric loss lets negatives go
    assert slope[:, :OLD].min() > 0
    assert torch.equal(slope[:, OLD:] < 0, step.targets[:, OLD:] == 1)


def test_masked_fine_tuning_leaves_old_logits_alone():
    step = random_step()
    loss = build("finetune", loss={"form": "bce", "old_labels": "masked"}).terms(step)["ce"]
    slope = gradient(loss, step.logits)
    assert torch.equal(slope[:, :OLD], torch.zeros(BATCH, OLD, dtype=torch.float64))
    logits, targets = step.logits.detach()[:, OLD:], step.targets[:, OLD:]
    assert loss.item() == pytest.approx(bce_by_loops(logits.tolist(), targets.tolist()), abs=1e-9)


@pytest.mark.parametrize(("form", "formula"), [("bce", bce_by_loops), ("asl", asl_by_loops)])
def test_joint_training_uses_the_labels_of_all_classes(form: str, formula):
    step = random_step(seen_labels=True)
    assert step.targets[:, :OLD].sum() > 0
    loss = build("joint", loss={"form": form}).terms(step)["ce"]
    assert loss.item() == pytest.approx(formula(step.logits.tolist(), step.targets.tolist()), rel=1e-6)
    assert torch.equal(gradient(loss, step.logits) < 0, step.targets == 1)


def test_joint_asks_for_all_labels_and_starts_from_scratch():
    assert resolve("voc", {"method": "joint"}).labels == "seen"
    assert [name for name in METHODS if not registered()[base_method(name)].continues] == ["joint"]
    assert {resolve("voc", {"method": name}).labels for name in METHODS if name != "joint"} == {"task"}


# Max-entropy, with any method


def weighed(name: str, step: LossInputs) -> int:
    """How often a mean over images counts relative to the classification loss: ASL is a sum over them."""
    return len(step.logits) if build(name).config.loss.form == "asl" else 1


@pytest.mark.parametrize("name", DESCENDING)
def test_any_method_may_add_max_entropy_on_the_old_classes(name: str):
    step = random_step()
    without = build(name, max_entropy={"beta": 0}).loss(step)
    terms = build(name, max_entropy={"beta": 0.25}).loss(step)
    assert set(terms) == {*without, "H"}
    assert "H" not in without
    for key, value in without.items():
        assert torch.equal(terms[key], value)
    expected = -0.25 * entropy_by_loops(step.logits[:, :OLD].tolist()) * weighed(name, step)
    assert terms["H"].item() == pytest.approx(expected, abs=1e-9)
    slope = gradient(terms["H"], step.logits)
    assert slope[:, :OLD].abs().min() > 0
    assert torch.equal(slope[:, OLD:], torch.zeros_like(slope[:, OLD:]))


@pytest.mark.parametrize("name", DESCENDING)
def test_max_entropy_over_all_classes_touches_new_logits_too(name: str):
    step = random_step()
    term = build(name, max_entropy={"beta": 0.25, "classes": "all"}).loss(step)["H"]
    expected = -0.25 * entropy_by_loops(step.logits.tolist()) * weighed(name, step)
    assert term.item() == pytest.approx(expected, abs=1e-9)
    assert gradient(term, step.logits).abs().min() > 0


@pytest.mark.parametrize("name", DESCENDING)
def test_max_entropy_waits_for_old_classes(name: str):
    assert "H" not in build(name, max_entropy={"beta": 0.25, "classes": "all"}).loss(random_step(old=0))


@pytest.mark.parametrize("setting", [{"form": "binary"}, {"reduction": "mean"}], ids=["binary", "mean"])
def test_form_and_reduction_of_max_entropy_reach_the_loss(setting: dict[str, str]):
    step = random_step()
    term = build("csc", max_entropy={"beta": 0.25, **setting}).loss(step)["H"]
    form, reduction = setting.get("form", "one_sided"), setting.get("reduction", "sum")
    assert torch.equal(term, -0.25 * max_entropy(step.logits[:, :OLD], form, reduction))
    assert not torch.isclose(term, -0.25 * max_entropy(step.logits[:, :OLD]), rtol=0.05)


@pytest.mark.parametrize("name", ["csc", "lwf", "agcn"])
def test_with_asl_labels_and_prior_are_both_sums_over_all_entries(name: str):
    step = random_step()
    terms = build(name, loss={"form": "asl", "alpha": 0.25}).terms(step)
    soft = step.prior_logits.sigmoid()
    expected = 0.75 * bce_by_loops(step.logits[:, :OLD].tolist(), soft.tolist()) * BATCH * OLD
    assert terms["kd"].item() == pytest.approx(expected)
    labelled = asl_by_loops(step.logits[:, OLD:].tolist(), step.targets[:, OLD:].tolist())
    assert terms["ce"].item() == pytest.approx(0.25 * labelled)
