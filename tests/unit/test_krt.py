"""KRT: its head against a transcription task by task, its pseudo-labels, and what stays as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, gelu, layer_norm

from csc.config import resolve
from csc.distributed.group import Group, single_process
from csc.methods.base import LossInputs, Replay
from csc.methods.krt import KRT, KrtSettings, class_thresholds, search_threshold
from csc.methods.losses import asymmetric_loss
from csc.nets.attention import GRID, IncrementalCrossAttention
from csc.nets.head import grow
from csc.nets.network import Network, Outputs

BATCH, FEATURES, WIDTH, HEADS = 3, 6, 16, 4
GROUPS = (3, 2, 4)
OLD, NEW = 5, 4
N = OLD + NEW
CONFIG = KrtSettings(width=WIDTH, heads=HEADS)


def settled_head(groups: tuple[int, ...] = GROUPS, seed: int = 0) -> IncrementalCrossAttention:
    """A head whose every tensor has a value that matters, in double precision."""
    torch.manual_seed(seed)
    head = IncrementalCrossAttention(FEATURES, groups, CONFIG).double()
    with torch.no_grad():
        for value in head.parameters():
            value.copy_(torch.randn_like(value) / (value.shape[-1] ** 0.5 if value.ndim > 1 else 1))
    return head


def feature_maps(side: int = GRID, batch: int = BATCH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, FEATURES, side, side, generator=generator, dtype=torch.float64)


def outputs_task_by_task(weights: dict[str, Tensor], maps: Tensor, tasks: int) -> tuple[Tensor, Tensor]:
    """Fact sheet 3.9, one task after another: a whole sequence, and a whole attention over it, for each."""
    F = maps.flatten(2).transpose(1, 2)
    W = weights["projection.weight"][:, :, 0, 0]
    image_tokens = F @ W.T + weights["projection.bias"] + weights["position"].flatten(2).transpose(1, 2)
    KT = weights["transfer"].expand(len(maps), 1, WIDTH)
    logits, embeddings = [], []
    for i in range(tasks):
        sequence = torch.cat([KT, weights[f"tokens.{i}"].expand(len(maps), 1, WIDTH), image_tokens], dim=1)
        Y = layer_norm(sequence, (WIDTH,), weights["block.norm.weight"], weights["block.norm.bias"])
        q, k, v = (
            (tokens @ weights[f"block.{name}.weight"].T).view(len(maps), -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for name, tokens in (("query", Y[:, :1]), ("key", Y), ("value", Y))
        )
        attention = (q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5).softmax(dim=3)
        context = (attention @ v).transpose(1, 2).reshape(len(maps), WIDTH)
        u = KT[:, 0] + context @ weights["block.output.weight"].T + weights["block.output.bias"]
        h = layer_norm(u, (WIDTH,), weights["block.mlp.0.weight"], weights["block.mlp.0.bias"])
        h = gelu(h @ weights["block.mlp.1.weight"].T + weights["block.mlp.1.bias"])
        e = u + h @ weights["block.mlp.3.weight"].T + weights["block.mlp.3.bias"]
        normal = layer_norm(e, (WIDTH,), weights[f"heads.{i}.0.weight"], weights[f"heads.{i}.0.bias"])
        logits.append(normal @ weights[f"heads.{i}.1.weight"].T + weights[f"heads.{i}.1.bias"])
        embeddings.append(e)
    return torch.cat(logits, dim=1), torch.stack(embeddings, dim=1)


# The head


@pytest.mark.parametrize("groups", [(3,), GROUPS, (1,) * 12], ids=str)
def test_the_head_computes_one_attention_per_task(groups: tuple[int, ...]):
    head, maps = settled_head(groups), feature_maps()
    logits, embeddings = head.logits_and_features(maps)
    expected = outputs_task_by_task(head.state_dict(), maps, len(groups))
    assert logits.shape == (BATCH, sum(groups)) == (BATCH, head.classes)
    assert embeddings.shape == (BATCH, len(groups), WIDTH)
    torch.testing.assert_close(logits, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(embeddings, expected[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(head(maps), logits)
    single = head.float()(maps.float())
    torch.testing.assert_close(single, expected[0].float(), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_one_attention_per_task():
    head, maps = settled_head(), feature_maps()
    named = dict(head.named_parameters())
    slopes = torch.randn(BATCH, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    got = torch.autograd.grad((head(maps) * slopes).sum(), named.values())
    plain, _ = outputs_task_by_task(named, maps, len(GROUPS))
    expected = torch.autograd.grad((plain * slopes).sum(), named.values())
    for name, one, other in zip(named, got, expected, strict=True):
        assert one.abs().max() > 0, name
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("side", [1, 6, 14])
def test_maps_of_any_size_are_read_with_positions_interpolated(side: int):
    head, maps = settled_head(), feature_maps(side)
    assert head(maps).shape == (BATCH, N)
    with torch.no_grad():
        before = head(maps)
        head.position[:] = 0.7
        alike = head(maps)
        assert not torch.allclose(alike, before)
        head.position[:] = 0
        head.projection.bias += 0.7  # the same at all positions
        torch.testing.assert_close(head(maps), alike)
        assert head.position.shape == (1, WIDTH, GRID, GRID)


def test_an_answer_depends_on_its_own_image_and_a_batch_may_be_empty():
    head, maps = settled_head(), feature_maps()
    torch.testing.assert_close(head(maps[1:2]), head(maps)[1:2])
    assert head(maps[:0]).shape == (0, N)


def test_scores_far_apart_stay_finite():
    head = settled_head().float()
    with torch.no_grad():
        head.block.query.weight *= 1e4
    logits = head(feature_maps().float())
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(value.grad.isfinite().all() for value in head.parameters())


def test_half_precision_gives_about_the_same_answers():
    head, maps = settled_head().float(), feature_maps().float()
    expected = head(maps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head(maps).float(), expected, rtol=0.1, atol=0.1)


def test_a_token_moves_the_answers_of_its_own_task_alone():
    head, maps = settled_head(), feature_maps()
    before = head(maps)
    with torch.no_grad():
        head.tokens[1] += 1 + torch.arange(WIDTH)
    changed = (head(maps) - before).abs().amax(dim=0) > 1e-9
    assert changed.tolist() == [False] * 3 + [True] * 2 + [False] * 4


def test_growing_adds_a_task_and_keeps_every_old_answer():
    old = settled_head(GROUPS[:2])
    larger = grow(old, N).double()
    assert larger.task_sizes == GROUPS
    assert set(larger.state_dict()) - set(old.state_dict()) == {
        "tokens.2",
        "heads.2.0.weight",
        "heads.2.0.bias",
        "heads.2.1.weight",
        "heads.2.1.bias",
    }
    maps = feature_maps()
    torch.testing.assert_close(larger(maps)[:, :OLD], old(maps), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        larger.logits_and_features(maps)[1][:, :2], old.logits_and_features(maps)[1], rtol=1e-6, atol=1e-6
    )


def test_first_weights_are_small_but_for_the_classifiers_of_later_tasks():
    torch.manual_seed(0)
    head = IncrementalCrossAttention(32, (40, 40), KrtSettings(width=64, heads=8))
    head.requires_grad_(False)
    layers = {name: value for name, value in head.named_parameters() if value.ndim == 2 and name.startswith("block")}
    assert len(layers) == 6
    assert all(float(value.std()) == pytest.approx(0.01, rel=0.1) for value in layers.values())
    assert float(head.heads[0][1].weight.std()) == pytest.approx(0.01, rel=0.1)
    assert float(head.heads[1][1].weight.std()) == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.1)
    assert float(head.projection.weight.std()) == pytest.approx((2 / 64) ** 0.5, rel=0.1)
    assert float(head.position.std()) == pytest.approx(0.02, rel=0.1)
    assert max(float(token.abs().max()) for token in head.tokens) < 0.1


@pytest.mark.parametrize(("dataset", "width"), [("coco", 384), ("voc", 768), ("digits", 64)])
def test_the_settings_build_a_head_of_the_published_width(dataset: str, width: int):
    config = resolve(dataset, {"method": "krt"})
    assert (config.head, config.krt.width, config.krt.heads) == ("attention", width, 8)
    assert resolve(dataset, {"method": "krt-r"}).krt == config.krt


# The threshold of the pseudo-labels


def scores_of_a_prior(images: int = 2000, classes: int = 10, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(images, classes, generator=generator) - 1).sigmoid()


def walked(scores: Tensor, expected: float, start: float) -> tuple[float, bool]:
    """The search as the fact sheet tells it, move by move; whether it got there."""
    eta = start
    for _ in range(101):
        average = float((scores > eta).sum(dim=1).double().mean())
        if abs(average - expected) <= 0.1:
            return eta, True
        eta = min(max(eta + (0.005 if average > expected else -0.005), 1e-4), 0.999999)
    return eta, False


@pytest.mark.parametrize("start", [0.9, 0.8, 0.5])
@pytest.mark.parametrize("expected", [0.4, 1.4, 2.9])
def test_the_threshold_is_where_the_walk_ends(expected: float, start: float):
    scores = scores_of_a_prior()
    eta, count = search_threshold(scores, expected, start)
    assert abs(count - expected) <= 0.1
    assert count == pytest.approx(float((scores > eta).sum(dim=1).double().mean()))
    assert (pytest.approx(eta, abs=1e-9), True) == walked(scores, expected, start)


def test_a_threshold_that_already_fits_stays():
    scores = scores_of_a_prior()
    eta, _ = search_threshold(scores, 1.4, 0.8)
    assert search_threshold(scores, 1.4, eta)[0] == eta


@pytest.mark.parametrize(
    ("score", "expected", "nearest"),
    [
        (0.5, 0.4, (0.5, 0.0)),  # one score per image at the threshold: 0 of them exceed it, 1 just below
        (0.99, 2.0, (0.8, 1.0)),  # never more than one
        (0.1, 0.5, (0.8, 0.0)),  # too far away
    ],
)
def test_a_walk_that_does_not_arrive_ends_at_the_nearest(score: float, expected: float, nearest: tuple[float, float]):
    scores = torch.full((20, 1), score)
    start = nearest[0]
    assert not walked(scores, expected, start)[1]
    assert search_threshold(scores, expected, start) == (pytest.approx(start), nearest[1])


def test_the_threshold_keeps_within_its_bounds():
    certain = torch.ones(10, 4)
    assert search_threshold(certain, 0.0, 0.9)[0] <= 0.999999
    nothing = torch.full((10, 4), 1e-6)
    assert search_threshold(nothing, 2.0, 0.2)[0] >= 1e-4


class FakeObjective(SimpleNamespace):
    """A task of which a method sees the prior model's logits."""

    group = single_process()

    def logits_of_prior(self) -> Tensor:
        return self.logits


def test_a_task_starts_with_the_pseudo_labels_that_its_old_classes_let_expect(capsys: pytest.CaptureFixture[str]):
    method = KRT(resolve("coco", {"method": "krt"}))
    scores = scores_of_a_prior(classes=40)
    method.begin(FakeObjective(prior=object(), logits=scores.logit()))
    count = float((scores > method.threshold).sum(dim=1).double().mean())
    assert count == pytest.approx(2.9 * 40 / 80, abs=0.1)
    assert capsys.readouterr().out == ""
    later = KRT(method.config, method.state)  # as the next task gets it
    assert later.threshold == method.threshold != 0.8


def test_an_expectation_that_cannot_be_met_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]):
    method = KRT(resolve("coco", {"method": "krt"}))
    method.begin(FakeObjective(prior=object(), logits=torch.full((10, 40), 9.0)))
    assert method.threshold == pytest.approx(0.8, abs=0.2)
    assert capsys.readouterr().out.count("\n") == 1


def test_of_several_processes_only_the_first_reports_it(capsys: pytest.CaptureFixture[str]):
    for rank, lines in ((0, 1), (1, 0)):
        group, logits = Group(rank, 2, torch.device("cpu")), torch.full((10, 40), 9.0)
        KRT(resolve("coco", {"method": "krt"})).begin(FakeObjective(prior=object(), logits=logits, group=group))
        assert capsys.readouterr().out.count("\n") == lines


def test_the_base_task_has_no_threshold_to_look_for():
    method = KRT(resolve("voc", {"method": "krt"}))
    method.begin(FakeObjective(prior=None))
    assert not method.state
    assert method.threshold == 0.8


# The loss


def random_step(prior: Tensor | None = None, **more) -> LossInputs:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(BATCH, N, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 2, (BATCH, N), generator=generator).double()
    targets[:, :OLD] = 0
    targets[0, 2:4] = 1  # an exemplar: its old labels are known
    return LossInputs(logits, targets, NEW, prior, **more)


@pytest.mark.parametrize(("form", "loss"), [("asl", asymmetric_loss), ("bce", binary_cross_entropy_with_logits)])
def test_pseudo_labels_are_added_to_the_labels_of_all_outputs(form: str, loss):
    method = KRT(resolve("voc", {"method": "krt", "loss": {"form": form}}), {"threshold": torch.tensor(0.7)})
    prior = torch.tensor([0.69, 0.71, 0.0, 0.99, 0.2], dtype=torch.float64).logit().expand(BATCH, OLD)
    step = random_step(prior)
    targets = step.targets.clone()
    targets[:, :OLD] = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 0, 1, 0], [0, 1, 0, 1, 0]])
    before = step.targets.clone()
    assert torch.equal(method.terms(step)["ce"], loss(step.logits, targets))
    assert torch.equal(step.targets, before)


def test_masking_leaves_out_what_neither_a_label_nor_the_prior_tells():
    settings = {"method": "krt", "loss": {"form": "bce"}, "memory": {"unknown": "masked"}}
    known = torch.ones(BATCH, N, dtype=torch.bool)
    known[1:, :OLD] = False  # hidden labels, which the prior model stands in for
    known[0, OLD:] = False  # an exemplar whose new labels nobody gave
    step = random_step(torch.zeros(BATCH, OLD, dtype=torch.float64), known=known)
    slope = torch.autograd.grad(KRT(resolve("voc", settings)).terms(step)["ce"], step.logits)[0]
    expected = known.clone()
    expected[:, :OLD] = True
    assert torch.equal(slope != 0, expected)


def test_exemplars_that_were_drawn_aside_add_their_own_term():
    step = random_step()
    one = torch.ones(BATCH, N)
    replay = Replay(step.logits, step.targets, one.bool(), one, one.bool())
    terms = KRT(resolve("voc", {"method": "krt"})).loss(random_step(replays=(replay,)))
    assert set(terms) == {"ce", "replay"}


def test_embeddings_weigh_more_the_fewer_of_the_classes_are_new():
    method = KRT(resolve("voc", {"method": "krt"}))
    values = torch.tensor([0.1, 0.2, 0.6])
    terms = method.terms(random_step(distances={"tokens": values}))
    assert terms["tokens"].item() == pytest.approx(80 * (N / NEW) ** 0.5 * 0.3)


def outputs_of(head: IncrementalCrossAttention, maps: Tensor) -> Outputs:
    return Outputs(*head.logits_and_features(maps), (maps,), None)


def test_identical_networks_have_no_distance_and_gradients_reach_what_is_shared():
    prior = settled_head(GROUPS[:2])
    learner, maps = grow(prior, N).double(), feature_maps()
    method = KRT(resolve("voc", {"method": "krt"}))
    assert method.distances(outputs_of(prior, maps), None) == {}
    same = method.distances(outputs_of(learner, maps), outputs_of(prior, maps))["tokens"]
    assert same.shape == (BATCH,)
    assert same.abs().max() < 1e-6
    with torch.no_grad():
        learner.transfer += torch.randn(1, WIDTH)
    now, before = outputs_of(learner, maps), outputs_of(prior, maps)
    distance = method.distances(now, before)["tokens"]
    for image in range(BATCH):
        a, b = now.representation[image, :2].detach().flatten(), before.representation[image].detach().flatten()
        assert distance[image].item() == pytest.approx(1 - float(a @ b / (a.norm() * b.norm())), abs=1e-6)
    distance.sum().backward()
    assert learner.transfer.grad.abs().max() > 0
    assert learner.tokens[2].grad is None or learner.tokens[2].grad.abs().max() == 0


def test_tokens_and_classifiers_of_old_tasks_are_frozen_and_nothing_else():
    head = settled_head((1,) * 12)
    network = Network(torch.nn.Identity(), head, (0.5,), (0.5,))
    frozen = list(KRT(resolve("voc", {"method": "krt"})).frozen_parameters(network))
    expected = {
        f"head.{name}"
        for name, _ in head.named_parameters()
        if name.split(".")[0] in ("tokens", "heads") and name.split(".")[1] != "11"
    }
    assert set(frozen) == expected
    assert len(frozen) == 11 * 5


def test_frozen_answers_change_through_shared_layers_only():
    head, maps = settled_head(), feature_maps()
    for name in head.old_parameters():
        head.get_parameter(name).requires_grad_(False)
    before = {name: value.detach().clone() for name, value in head.named_parameters()}
    optimizer = torch.optim.Adam([value for value in head.parameters() if value.requires_grad], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        head(maps).square().sum().backward()
        optimizer.step()
    moved = {name for name, value in head.named_parameters() if not torch.equal(value, before[name])}
    assert moved == set(before) - set(head.old_parameters())


def test_another_head_has_nothing_to_freeze():
    network = Network(torch.nn.Identity(), torch.nn.Linear(2, 2), (0.5,), (0.5,))
    assert not list(KRT(resolve("voc", {"method": "krt", "head": "linear"})).frozen_parameters(network))


def test_each_class_may_have_its_own_threshold():
    scores = torch.rand(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.2, 0.6, 1.0])
    thresholds = class_thresholds(scores, torch.tensor([0.1, 0.5, 0.0]))
    assert (scores > thresholds).sum(0).tolist() == [20, 100, 0]
    method = KRT(resolve("voc", {"method": "krt", "krt": {"per_class": True}}))
    step = random_step(torch.zeros(BATCH, OLD, dtype=torch.float64))
    method.threshold = torch.full((OLD,), 2.0, dtype=torch.float64)
    without = method.terms(step)["ce"]
    method.threshold[0] = -1.0  # of the first class all images have a pseudo-label
    assert method.terms(step)["ce"] != without
