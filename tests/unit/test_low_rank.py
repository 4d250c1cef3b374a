"""The low-rank label graph: the same network with hubs in between, at a cost that is linear in the classes."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks import scale
from csc.methods.csc import CigcnSettings
from csc.nets.ci_gcn import CIGCN
from csc.nets.head import grow, grown_parameters
from tests.unit.test_ci_gcn import BATCH, CLASSES, FEATURES, MANY, NEW, OLD, WIDTH, feature_maps, settled_head

RANK = 2
CLASS_SIZED = {"class_maps.weight", "general_cm", "hubs", "output.weight", "output.bias"}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("classes", [CLASSES, MANY])
def test_as_many_hubs_as_classes_start_as_the_full_form(classes: int, plain: bool):
    torch.manual_seed(0)
    full = CIGCN(FEATURES, classes, CigcnSettings(WIDTH, plain=plain)).eval()
    torch.manual_seed(0)
    low = CIGCN(FEATURES, classes, CigcnSettings(WIDTH, plain=plain, rank=classes)).eval()
    weights = low.state_dict()
    assert torch.equal(weights.pop("hubs"), torch.eye(classes))
    assert all(torch.equal(weights.pop(name), value) for name, value in full.state_dict().items())
    assert not weights
    torch.testing.assert_close(low(feature_maps()), full(feature_maps()))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rank", [1, RANK, CLASSES, CLASSES + 3])
def test_it_is_the_full_form_with_matrices_of_that_rank(rank: int, plain: bool, monkeypatch: pytest.MonkeyPatch):
    low, full = (
        settled_head(CigcnSettings(WIDTH, plain=plain, rank=rank)),
        settled_head(CigcnSettings(WIDTH, plain=plain), seed=1),
    )
    own = {name: value for name, value in low.state_dict().items() if name not in ("hubs", "general_cm")}
    full.load_state_dict({**full.state_dict(), **{k: v for k, v in own.items() if not k.startswith("specific_cm")}})
    P, Q = low.general_cm.detach(), low.hubs.detach()
    full.general_cm.data = P @ Q.T
    monkeypatch.setattr(full, "specific_matrix", lambda V1: low.specific_matrix(V1) @ Q.T)
    with torch.no_grad():
        torch.testing.assert_close(low(feature_maps()), full(feature_maps()), rtol=1e-4, atol=1e-4)


def test_the_specific_matrix_has_a_column_per_hub():
    A_s = settled_head(CigcnSettings(WIDTH, rank=RANK)).specific_matrix(torch.randn(BATCH, CLASSES, WIDTH))
    assert A_s.shape == (BATCH, CLASSES, RANK)


def test_gradients_are_those_of_the_equations():
    head = settled_head(CigcnSettings(WIDTH, rank=RANK)).double()
    parameters = dict(head.named_parameters())

    def logits(*values: Tensor) -> Tensor:
        maps = feature_maps(batch=2).double()
        return torch.func.functional_call(head, dict(zip(parameters, values, strict=True)), (maps,))

    assert torch.autograd.gradcheck(logits, tuple(parameters.values()), eps=1e-6, atol=1e-4, fast_mode=True)


# First weights


@pytest.mark.parametrize("rank", [4, 16, 64])
def test_activations_start_as_large_as_in_the_full_form(rank: int):
    classes = 48
    nodes = torch.randn(8, 1, 32) + 0.1 * torch.randn(8, classes, 32)  # masks start flat, so nodes start alike

    def sizes(rank: int) -> Tensor:
        """Root mean squares of what nodes gather in the general and in the specific GCN, over several first weights."""
        measured = []
        for seed in range(20):
            torch.manual_seed(seed)
            head = CIGCN(FEATURES, classes, CigcnSettings(32, rank=rank)).eval()
            gathered = [head.gathered(A, nodes) for A in (head.general_matrix(), head.specific_matrix(nodes))]
            measured.append(torch.stack([value.square().mean() for value in gathered]))
        return torch.stack(measured).mean(0).sqrt()

    with torch.no_grad():
        torch.testing.assert_close(sizes(rank), sizes(0), rtol=0.15, atol=0)


def test_classes_are_dealt_to_the_hubs_in_turn():
    assert CIGCN(FEATURES, 5, CigcnSettings(WIDTH, rank=2)).hubs.tolist() == [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]]
    assert CIGCN(FEATURES, 2, CigcnSettings(WIDTH, rank=3)).hubs.tolist() == [[1, 0, 0], [0, 1, 0]]


# Growth


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rank", [RANK, CLASSES + 3])
def test_growing_keeps_every_old_row_and_all_that_has_no_classes(rank: int, plain: bool):
    old = settled_head(CigcnSettings(WIDTH, plain=plain, rank=rank), OLD)
    larger = grow(old, CLASSES)
    after = larger.state_dict()
    for name, value in old.state_dict().items():
        if name in CLASS_SIZED:
            assert after[name].shape == (CLASSES, *value.shape[1:]), name
            assert torch.equal(after[name][:OLD], value), name
        else:
            assert torch.equal(after[name], value), name
    assert set(grown_parameters(old, larger)) == CLASS_SIZED
    assert torch.equal(larger.hubs[OLD:], CIGCN(FEATURES, CLASSES, old.settings).hubs[OLD:])


def test_resetting_biases_touches_only_those_of_classes():
    old = settled_head(CigcnSettings(WIDTH, rank=RANK), OLD)
    torch.nn.init.constant_(old.output.bias, 9.0)
    larger = grow(old, CLASSES, reset_biases=True)
    assert larger.output.bias.abs().max() <= 1
    assert torch.equal(larger.specific_cm.bias, old.specific_cm.bias)


def test_new_classes_reach_old_ones_through_the_hubs_alone():
    old = settled_head(CigcnSettings(WIDTH, rank=RANK), OLD)
    larger = grow(old, CLASSES).eval()
    V0 = torch.randn(BATCH, CLASSES, WIDTH)
    with torch.no_grad():
        expected = old.general_gcn(V0[:, :OLD])
        influenced = larger.general_gcn(V0)[:, :OLD]
        larger.hubs[OLD:] = 0
        torch.testing.assert_close(larger.general_gcn(V0)[:, :OLD], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(influenced, expected, atol=1e-3)


def test_gradients_reach_every_row_of_the_grown_matrices():
    larger = grow(settled_head(CigcnSettings(WIDTH, rank=RANK), OLD), OLD + NEW).train()
    larger(feature_maps(batch=6)).square().sum().backward()
    for matrix in (larger.general_cm, larger.hubs, larger.specific_cm.weight):
        assert matrix.grad.abs().amax(dim=1).min() > 0


# Cost


def test_no_tensor_has_more_than_one_axis_of_classes():
    classes = 101  # equal to no other size
    head = CIGCN(FEATURES, classes, CigcnSettings(WIDTH, rank=RANK)).train()
    shapes = [tuple(value.shape) for value in head.parameters()]
    with saved_tensors_hooks(lambda tensor: shapes.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor):
        head(feature_maps())
    assert max(shape.count(classes) for shape in shapes) == 1


def test_memory_grows_by_the_same_amount_with_each_thousand_classes():
    one, two, three = (scale.head_memory(classes, rank=8) for classes in (1_000, 2_000, 3_000))
    assert three - two == two - one
    one, two, three = (scale.head_memory(classes, rank=0) for classes in (1_000, 2_000, 3_000))
    assert three - two > 1.3 * (two - one)


@pytest.mark.parametrize("rank", [0, 8])
def test_memory_counted_from_shapes_is_that_of_a_real_pass(rank: int):
    head, maps = scale._head(20, rank), scale._maps(scale.BATCH)
    kept = {parameter.data_ptr(): parameter.nbytes for parameter in head.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = head(maps)
    assert logits.shape == (scale.BATCH, 20)  # alive until here, and with it all that was kept
    assert sum(kept.values()) == scale.head_memory(20, rank)
