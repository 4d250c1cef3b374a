"""CI-GCN against a loop-by-loop transcription of its equations, and what must hold when it grows."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from csc.methods.csc import CigcnSettings
from csc.nets.ci_gcn import CIGCN
from csc.nets.head import grow, grown_parameters

BATCH, FEATURES, HEIGHT, ACROSS, WIDTH = 3, 6, 2, 3, 5
OLD, NEW = 3, 2
CLASSES = OLD + NEW  # fewer than the positions of a map
MANY = HEIGHT * ACROSS + 2  # more than the positions: the transform comes before the masks
CORRELATIONS = ("G->S", "Z->S", "Z->Z")
VARIANTS = [
    CigcnSettings(WIDTH, *values)
    for values in product(
        CORRELATIONS, ("softmax", "sigmoid"), ("spatial", "class"), ("max", "avg"), ("mean", "sum"), (False, True)
    )
]
CLASS_SIZED = {
    "G->S": {
        "class_maps.weight",
        "general_cm",
        "specific_cm.weight",
        "specific_cm.bias",
        "output.weight",
        "output.bias",
    },
    "Z->S": {
        "class_maps.weight",
        "statistical_cm",
        "specific_cm.weight",
        "specific_cm.bias",
        "output.weight",
        "output.bias",
    },
    "Z->Z": {"class_maps.weight", "statistical_cm", "output.weight", "output.bias"},
}


def variant_name(config: CigcnSettings) -> str:
    ending = "-plain" if config.plain else ""
    return f"{config.correlation}-{config.masks}-{config.mask_axis}-{config.pooling}-{config.fusion}{ending}"


def settled_head(config: CigcnSettings, classes: int = CLASSES, seed: int = 0) -> CIGCN:
    """A head in eval mode whose every tensor, batch-norm statistics included, has a value that matters."""
    torch.manual_seed(seed)
    head = CIGCN(FEATURES, classes, config).eval()
    with torch.no_grad():
        for name, value in head.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.3, 2.5)
            elif value.is_floating_point():
                value.normal_(0, 0.7)
    return head


def feature_maps(batch: int = BATCH, seed: int = 1) -> Tensor:
    return torch.randn(batch, FEATURES, HEIGHT, ACROSS, generator=torch.Generator().manual_seed(seed))


# The transcription: section 2.1 of the fact sheet, one image at a time, in plain loops.


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def lrelu(x: float) -> float:
    return x if x >= 0 else 0.2 * x


def dot(one: list[float], other: list[float]) -> float:
    total = 0.0
    for a, b in zip(one, other, strict=True):
        total += a * b
    return total


def layer(weights: dict[str, list], name: str, x: list[float]) -> list[float]:
    """W x + b, with b left out where the layer has none."""
    rows = weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias", [0.0] * len(rows))
    return [dot(row, x) + b for row, b in zip(rows, bias, strict=True)]


def softmax(values: list[float]) -> list[float]:
    exponentials = [math.exp(value) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def gather(matrix: list[list[float]], nodes: list[list[float]]) -> list[list[float]]:
    """Node j of the result is Σ_i matrix[j][i] · nodes[i]."""
    depth = len(nodes[0])
    result = []
    for row in matrix:
        node = [0.0] * depth
        for weight, other in zip(row, nodes, strict=True):
            for d in range(depth):
                node[d] += weight * other[d]
        result.append(node)
    return result


def masks_by_loops(config: CigcnSettings, S: list[list[float]]) -> list[list[float]]:
    """Masks of S, both [class][position]."""
    classes, positions = range(len(S)), range(len(S[0]))
    if config.masks == "sigmoid":
        return [[sigmoid(S[c][p]) for p in positions] for c in classes]
    if config.mask_axis == "spatial":
        return [softmax(S[c]) for c in classes]
    per_position = [softmax([S[c][p] for c in classes]) for p in positions]
    return [[per_position[p][c] for p in positions] for c in classes]


def specific_matrix_by_loops(weights: dict[str, list], V1: list[list[float]]) -> list[list[float]]:
    """A[j][i] = a_ij = σ(w_i · [g ; v_j] + b_i)."""
    n, depth = len(V1), len(V1[0])
    mean = [sum(V1[c][d] for c in range(n)) / n for d in range(depth)]
    g = layer(weights, "pooled", mean)
    for d in range(len(g)):
        deviation = math.sqrt(weights["pooled_norm.running_var"][d] + 1e-5)
        scaled = (g[d] - weights["pooled_norm.running_mean"][d]) / deviation
        g[d] = lrelu(scaled * weights["pooled_norm.weight"][d] + weights["pooled_norm.bias"][d])
    return [[sigmoid(value) for value in layer(weights, "specific_cm", g + V1[j])] for j in range(n)]


def logits_by_loops(config: CigcnSettings, weights: dict[str, list], image: np.ndarray) -> list[float]:
    """Logits of one image (features, h, w)."""
    vectors = [image[:, y, x].tolist() for y in range(image.shape[1]) for x in range(image.shape[2])]
    n = len(weights["class_maps.weight"])
    S = [[dot(weights["class_maps.weight"][c], vector) for vector in vectors] for c in range(n)]
    y_cls = [max(S[c]) if config.pooling == "max" else sum(S[c]) / len(S[c]) for c in range(n)]
    M = masks_by_loops(config, S)
    T = vectors if config.plain else [layer(weights, "transform", vector) for vector in vectors]
    V0 = gather(M, T)
    learned = config.correlation == "G->S"
    U = gather(weights["general_cm" if learned else "statistical_cm"], V0)
    if not config.plain:
        U = [[lrelu(value) for value in node] for node in U]
    G = [[lrelu(value) for value in layer(weights, "W_g", node)] for node in U]
    V1 = G if config.plain else [[v + g for v, g in zip(*pair, strict=True)] for pair in zip(V0, G, strict=True)]
    A = weights["statistical_cm"] if config.correlation == "Z->Z" else specific_matrix_by_loops(weights, V1)
    Q = gather(A, V1)
    if not config.plain:
        Q = [[lrelu(value) for value in node] for node in Q]
    V2 = [[lrelu(value) for value in layer(weights, "W_s", node)] for node in Q]
    out = V2 if config.plain else [[v + w for v, w in zip(*pair, strict=True)] for pair in zip(V0, V2, strict=True)]
    y_gcn = [dot(weights["output.weight"][c], out[c]) + weights["output.bias"][c] for c in range(n)]
    share = 2 if config.fusion == "mean" else 1
    return [(a + b) / share for a, b in zip(y_cls, y_gcn, strict=True)]


@pytest.mark.parametrize("classes", [CLASSES, MANY])
@pytest.mark.parametrize("config", VARIANTS, ids=variant_name)
def test_the_network_computes_the_equations(config: CigcnSettings, classes: int):
    head, maps = settled_head(config, classes), feature_maps()
    weights = {name: value.double().tolist() for name, value in head.state_dict().items()}
    expected = [logits_by_loops(config, weights, image) for image in maps.double().numpy()]
    with torch.no_grad():
        logits = head(maps)
    assert logits.shape == (BATCH, classes)
    np.testing.assert_allclose(logits.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [CLASSES, MANY])
@pytest.mark.parametrize("masks", ["softmax", "sigmoid"])
@pytest.mark.parametrize("plain", [False, True])
def test_gradients_are_those_of_the_equations(masks: str, plain: bool, classes: int):
    """Activations overwrite their inputs; finite differences would show a value that backward still needed."""
    head = settled_head(CigcnSettings(WIDTH, masks=masks, plain=plain), classes).double()
    maps = feature_maps(batch=2).double().requires_grad_()
    parameters = dict(head.named_parameters())

    def logits(maps: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(head, dict(zip(parameters, values, strict=True)), (maps,))

    assert torch.autograd.gradcheck(logits, (maps, *parameters.values()), eps=1e-6, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("classes", [CLASSES, MANY])
@pytest.mark.parametrize("masks", ["softmax", "sigmoid"])
def test_the_memory_format_of_the_maps_does_not_matter(masks: str, classes: int):
    head = settled_head(CigcnSettings(WIDTH, masks=masks), classes)
    maps = feature_maps()
    channels_last = maps.contiguous(memory_format=torch.channels_last)
    assert channels_last.stride() != maps.stride()
    torch.testing.assert_close(head(channels_last), head(maps))


@pytest.mark.parametrize("classes", [CLASSES, MANY])
@pytest.mark.parametrize("masks", ["softmax", "sigmoid"])
def test_nodes_stay_in_half_precision_under_autocast(masks: str, classes: int):
    head = settled_head(CigcnSettings(WIDTH, masks=masks), classes)
    F = feature_maps().flatten(2).transpose(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        V0 = head.label_nodes(head.masks(head.class_maps(F)), F)
        V1 = head.general_gcn(V0)
        assert {V0.dtype, V1.dtype, head.specific_gcn(V1).dtype} == {torch.bfloat16}


@pytest.mark.parametrize("key", ["correlation", "masks", "mask_axis", "pooling", "fusion", "plain"])
def test_every_setting_changes_the_logits(key: str):
    """Otherwise the comparison above could not tell the variants apart."""
    other = {"correlation": "Z->S", "masks": "sigmoid", "mask_axis": "class", "pooling": "avg", "fusion": "sum"}
    one, two = CigcnSettings(FEATURES), CigcnSettings(FEATURES, **{key: other.get(key, True)})
    torch.manual_seed(0)
    first, second = CIGCN(FEATURES, CLASSES, one).eval(), CIGCN(FEATURES, CLASSES, two).eval()
    second.load_state_dict(first.state_dict(), strict=False)
    assert not torch.allclose(first(feature_maps()), second(feature_maps()), atol=1e-4)


def test_a_model_of_the_default_settings_has_the_tensors_it_always_had():
    shapes = {
        name: tuple(value.shape) for name, value in CIGCN(FEATURES, CLASSES, CigcnSettings(WIDTH)).state_dict().items()
    }
    assert shapes == {
        "class_maps.weight": (CLASSES, FEATURES),
        "transform.weight": (WIDTH, FEATURES),
        "transform.bias": (WIDTH,),
        "general_cm": (CLASSES, CLASSES),
        "W_g.weight": (WIDTH, WIDTH),
        "W_g.bias": (WIDTH,),
        "pooled.weight": (WIDTH, WIDTH),
        "pooled.bias": (WIDTH,),
        "pooled_norm.weight": (WIDTH,),
        "pooled_norm.bias": (WIDTH,),
        "pooled_norm.running_mean": (WIDTH,),
        "pooled_norm.running_var": (WIDTH,),
        "pooled_norm.num_batches_tracked": (),
        "specific_cm.weight": (CLASSES, 2 * WIDTH),
        "specific_cm.bias": (CLASSES,),
        "W_s.weight": (WIDTH, WIDTH),
        "W_s.bias": (WIDTH,),
        "output.weight": (CLASSES, WIDTH),
        "output.bias": (CLASSES,),
    }


def test_plain_has_no_transform_and_no_biases_in_the_graph_layers():
    names = set(CIGCN(FEATURES, CLASSES, CigcnSettings(WIDTH, plain=True)).state_dict())
    assert not names & {"transform.weight", "transform.bias", "W_g.bias", "W_s.bias"}


def test_the_specific_matrix_differs_from_image_to_image_and_the_general_one_does_not():
    head = settled_head(CigcnSettings(WIDTH))
    A_s = head.specific_matrix(torch.randn(2, CLASSES, WIDTH))
    assert A_s.shape == (2, CLASSES, CLASSES)
    assert not torch.allclose(A_s[0], A_s[1])
    assert head.general_matrix() is head.general_cm


# Size and first weights


@pytest.mark.parametrize(("classes", "millions"), [(20, 5.35), (80, 5.67)])
def test_the_paper_size_has_the_published_number_of_parameters(classes: int, millions: float):
    with torch.device("meta"):
        head = CIGCN(2048, classes, CigcnSettings(1024))
    assert round(sum(value.numel() for value in head.parameters()) / 1e6, 2) == millions


@pytest.mark.parametrize("classes", [16, 100])
def test_the_general_matrix_starts_uniform_within_one_over_the_root_of_n(classes: int):
    torch.manual_seed(0)
    A_g = CIGCN(4, classes, CigcnSettings(2)).general_cm.detach()
    bound = 1 / math.sqrt(classes)
    assert 0.97 * bound < A_g.abs().max() <= bound
    assert float(A_g.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert abs(float(A_g.mean())) < 0.1 * bound


# Growth


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_growing_keeps_the_old_block_of_every_class_sized_tensor(correlation: str, plain: bool):
    old = settled_head(CigcnSettings(WIDTH, correlation, plain=plain), OLD)
    before = {name: value.clone() for name, value in old.state_dict().items()}
    after = grow(old, CLASSES).state_dict()
    class_sized = {name for name in before if before[name].shape != after[name].shape}
    assert class_sized == CLASS_SIZED[correlation]
    for name in class_sized:
        value = before[name]
        assert after[name].shape[0] == CLASSES
        for index in np.ndindex(*value.shape):
            assert after[name][index] == value[index], (name, index)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_growing_leaves_everything_else_identical(correlation: str, plain: bool):
    old = settled_head(CigcnSettings(WIDTH, correlation, plain=plain), OLD)
    after = grow(old, CLASSES).state_dict()
    assert set(after) == set(old.state_dict())
    kept = {name: value for name, value in old.state_dict().items() if name not in CLASS_SIZED[correlation]}
    assert kept
    for name, value in kept.items():
        assert torch.equal(after[name], value), name


def test_growing_never_writes_to_the_old_head():
    old = settled_head(CigcnSettings(WIDTH), OLD)
    before = {name: value.clone() for name, value in old.state_dict().items()}
    larger = grow(old, CLASSES)
    with torch.no_grad():
        for value in larger.state_dict().values():
            value.zero_()
    assert old.classes == OLD
    assert larger.classes == CLASSES
    assert all(torch.equal(value, before[name]) for name, value in old.state_dict().items())


def test_new_entries_are_random_within_the_bounds_of_the_larger_layers():
    old = settled_head(CigcnSettings(WIDTH), OLD)
    torch.manual_seed(0)
    one = grow(old, CLASSES)
    two = grow(old, CLASSES)
    bounds = {
        "class_maps.weight": 1 / math.sqrt(FEATURES),
        "general_cm": 1 / math.sqrt(CLASSES),
        "specific_cm.weight": 1 / math.sqrt(2 * WIDTH),
        "specific_cm.bias": 1 / math.sqrt(2 * WIDTH),
        "output.weight": 1 / math.sqrt(WIDTH),
        "output.bias": 1 / math.sqrt(WIDTH),
    }
    for name, value in one.state_dict().items():
        if name in bounds:
            fresh, again = value[OLD:], two.state_dict()[name][OLD:]
            assert 0 < fresh.abs().max() <= bounds[name], name
            assert not torch.equal(fresh, again), name
    old_to_new = one.general_cm[:OLD, OLD:]
    assert 0 < old_to_new.abs().min() <= old_to_new.abs().max() <= bounds["general_cm"]


def test_the_statistical_matrix_grows_with_ones_on_the_new_diagonal():
    larger = grow(settled_head(CigcnSettings(WIDTH, "Z->S"), OLD), CLASSES)
    assert torch.equal(larger.statistical_cm[OLD:], torch.eye(CLASSES)[OLD:])
    assert torch.equal(larger.statistical_cm[:OLD, OLD:], torch.zeros(OLD, NEW))


def test_resetting_biases_leaves_class_sized_biases_fresh_and_copies_all_else():
    old = settled_head(CigcnSettings(WIDTH), OLD)
    with torch.no_grad():
        for name, value in old.named_parameters():
            if name.endswith("bias"):
                value.fill_(9.0)  # far out of the bounds of a fresh layer
    after = grow(old, CLASSES, reset_biases=True).state_dict()
    for name, value in old.state_dict().items():
        if name in {"specific_cm.bias", "output.bias"}:
            assert after[name].abs().max() <= 1, name
        else:
            block = after[name][tuple(slice(size) for size in value.shape)]
            assert torch.equal(block, value), name


def test_class_logits_of_the_old_classes_are_bitwise_unchanged_by_growth():
    old = settled_head(CigcnSettings(WIDTH, fusion="sum"), OLD)
    with torch.no_grad():
        # Whole numbers add up exactly in any order, so only a change of the weights can change the result.
        old.class_maps.weight.copy_(torch.randint(-8, 9, old.class_maps.weight.shape))
    larger = grow(old, CLASSES).eval()
    for head in (old, larger):
        torch.nn.init.zeros_(head.output.weight)  # z = y_cls + y_gcn, and now y_gcn = 0
        torch.nn.init.zeros_(head.output.bias)
    maps = (4 * feature_maps()).round()
    assert torch.equal(larger(maps)[:, :OLD], old(maps))
    assert old(maps).abs().max() > 0


def test_without_influence_of_new_nodes_the_general_gcn_of_the_old_classes_is_unchanged():
    old = settled_head(CigcnSettings(WIDTH), OLD)
    larger = grow(old, CLASSES).eval()
    V0 = torch.randn(BATCH, CLASSES, WIDTH)
    with torch.no_grad():
        influenced = larger.general_gcn(V0)[:, :OLD]
        larger.general_cm[:OLD, OLD:] = 0
        shielded = larger.general_gcn(V0)[:, :OLD]
        expected = old.general_gcn(V0[:, :OLD])
    torch.testing.assert_close(shielded, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(influenced, expected, atol=1e-3)


def test_gradients_reach_old_and_new_entries_of_every_grown_layer_and_the_shared_ones():
    larger = grow(settled_head(CigcnSettings(WIDTH), OLD), CLASSES).train()
    larger(feature_maps(batch=6)).square().sum().backward()
    A_g = larger.general_cm.grad
    blocks = {
        "old-old": A_g[:OLD, :OLD],
        "old-new": A_g[:OLD, OLD:],
        "new-old": A_g[OLD:, :OLD],
        "new-new": A_g[OLD:, OLD:],
    }
    for name, block in blocks.items():
        assert block.abs().min() > 0, name
    for layer_of_classes in (larger.class_maps, larger.specific_cm, larger.output):
        for parameter in layer_of_classes.parameters():
            assert parameter.grad.reshape(CLASSES, -1).abs().amax(dim=1).min() > 0
    for shared in (larger.transform, larger.W_g, larger.W_s, larger.pooled_norm):
        for parameter in shared.parameters():
            assert parameter.grad.abs().max() > 0
    assert larger.pooled.weight.grad.abs().max() > 0  # its bias is undone by the batch-norm behind it


def test_the_statistical_matrix_is_fixed():
    head = settled_head(CigcnSettings(WIDTH, "Z->Z")).train()
    head(feature_maps()).sum().backward()
    assert "statistical_cm" not in dict(head.named_parameters())
    assert head.statistical_cm.grad is None


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_grown_parameters_are_the_class_sized_ones(correlation: str):
    old = settled_head(CigcnSettings(WIDTH, correlation), OLD)
    names = grown_parameters(old, grow(old, CLASSES))
    assert set(names) == CLASS_SIZED[correlation] - {"statistical_cm"}


def test_the_specific_matrix_may_be_divided_by_the_number_of_classes():
    plain, divided = settled_head(CigcnSettings(WIDTH)), settled_head(CigcnSettings(WIDTH, divide_specific=True))
    nodes = torch.randn(BATCH, CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(divided.eval().specific_matrix(nodes), plain.eval().specific_matrix(nodes) / CLASSES)
