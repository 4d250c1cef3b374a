"""Where networks look: each head's maps against what they are said to be."""

import pytest
import torch
from torch import Tensor

from csc.config import resolve
from csc.methods.csc import CigcnSettings
from csc.methods.krt import KrtSettings
from csc.methods.l2p import L2pSettings
from csc.methods.ridge import RidgeSettings
from csc.nets.activation import class_activation_maps, maps_of
from csc.nets.analytic import AnalyticHead
from csc.nets.attention import IncrementalCrossAttention
from csc.nets.backbone import StoredBackbone, build_backbone
from csc.nets.ci_gcn import CIGCN
from csc.nets.head import LinearHead
from csc.nets.label_graph import LabelGraph
from csc.nets.network import Network
from csc.nets.prompts import PromptedBackbone

FEATURES, CLASSES, HEIGHT, ACROSS = 6, 5, 3, 4
GROUPS = (3, 2)
HEADS = {
    "cigcn": lambda: CIGCN(FEATURES, CLASSES, CigcnSettings(8)),
    "linear": lambda: LinearHead(FEATURES, CLASSES),
    "label graph": lambda: LabelGraph(FEATURES, CLASSES, 8),
    "krt": lambda: IncrementalCrossAttention(FEATURES, GROUPS, KrtSettings(width=8, heads=2)),
    "ridge": lambda: AnalyticHead(FEATURES, CLASSES, RidgeSettings(hidden=8), seed=0),
}


def feature_maps() -> Tensor:
    return torch.randn(2, FEATURES, HEIGHT, ACROSS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", HEADS)
def test_every_head_gives_a_map_from_0_to_1_for_each_class(name: str):
    torch.manual_seed(0)
    network = Network(StoredBackbone({}, FEATURES), HEADS[name]().eval(), (0,), (1,))
    with torch.inference_mode():
        maps = class_activation_maps(network, feature_maps())
    assert maps.shape == (2, CLASSES, HEIGHT, ACROSS)
    assert torch.equal(maps.amin(dim=(2, 3)), torch.zeros(2, CLASSES))
    assert torch.equal(maps.amax(dim=(2, 3)), torch.ones(2, CLASSES))


def test_a_map_without_contrast_is_dark_and_finite():
    network = Network(StoredBackbone({}, FEATURES), LinearHead(FEATURES, CLASSES), (0,), (1,))
    with torch.inference_mode():
        assert class_activation_maps(network, torch.ones(1, FEATURES, 2, 2)).sum() == 0


def test_of_ci_gcn_they_are_its_masks():
    head = HEADS["cigcn"]().eval()
    F = feature_maps()
    vectors = F.flatten(2).transpose(1, 2)
    M = head.masks(vectors @ head.class_maps.weight.T)
    assert torch.allclose(maps_of(head, F).flatten(2).sum(dim=2), torch.ones(2, CLASSES))
    assert torch.allclose(maps_of(head, F)[:, 3, 1, 2], M[:, 1 * ACROSS + 2, 3])


def test_of_a_linear_head_their_mean_is_the_logit():
    head = LinearHead(FEATURES, CLASSES)
    F = feature_maps()
    assert torch.allclose(maps_of(head, F).mean(dim=(2, 3)), head(F), atol=1e-6)


def test_of_krt_they_are_the_attention_of_each_task_on_the_positions():
    head = HEADS["krt"]().eval().double()
    F = feature_maps().double()
    image_tokens = head.image_tokens(F)
    block = head.block
    maps = maps_of(head, F)
    for task, classes in enumerate((slice(0, 3), slice(3, 5))):
        tokens = [token.expand(2, 1, -1) for token in (head.transfer, head.tokens[task])]
        sequence = block.norm(torch.cat([*tokens, image_tokens], dim=1))
        q = block.query(block.norm(head.transfer)).view(2, -1)  # (heads, width of a head)
        k = block.key(sequence).view(2, sequence.shape[1], 2, -1)
        weights = (torch.einsum("hd,bphd->bhp", q, k) / q.shape[1] ** 0.5).softmax(dim=2)
        expected = weights[:, :, 2:].mean(dim=1).unflatten(1, (HEIGHT, ACROSS))
        for column in range(classes.start, classes.stop):
            assert torch.allclose(maps[:, column], expected)


def test_of_a_transformer_with_a_linear_head_attention_is_rolled_out_from_the_positions_that_speak_for_a_class():
    torch.manual_seed(0)
    backbone = build_backbone(resolve("digits", {"method": "l2p"}).backbone).eval()
    head = LinearHead(backbone.channels, CLASSES)
    network = Network(backbone, head, (0.5,) * 3, (0.5,) * 3)
    images = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    net = backbone.net
    with torch.inference_mode():
        maps = class_activation_maps(network, images)
        tokens = net.norm_pre(net._pos_embed(net.patch_embed(images / 127.5 - 1)))
        reached = torch.eye(tokens.shape[1]).expand(2, -1, -1)  # what each token has from each patch and [CLS]
        for block in net.blocks:
            q, k, _ = block.attn.qkv(block.norm1(tokens)).unflatten(2, (3, block.attn.num_heads, -1)).unbind(2)
            weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.shape[-1] ** -0.5).softmax(dim=3)
            reached = torch.einsum("bhij,bjk->bik", weights, reached) / weights.shape[1] / 2 + reached / 2
            tokens = block(tokens)
        speaking = head.linear(net.norm(tokens)[:, 1:]).softmax(dim=1)  # (B, patches, classes)
        expected = torch.einsum("bpn,bpk->bnk", speaking, reached[:, 1:, 1:])
    low, high = expected.amin(dim=2, keepdim=True), expected.amax(dim=2, keepdim=True)
    assert torch.allclose(maps.flatten(2), (expected - low) / (high - low), atol=1e-4)
    assert not torch.allclose(maps[:, 0], maps[:, 1])


def test_of_prompts_they_are_attention_rolled_out_to_the_patches():
    torch.manual_seed(0)
    backbone = PromptedBackbone(
        build_backbone(resolve("digits", {"method": "l2p"}).backbone), L2pSettings(pool=6, length=3, chosen=2)
    ).eval()
    network = Network(backbone, LinearHead(backbone.channels, CLASSES), (0.5,) * 3, (0.5,) * 3)
    images = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    fused = [block.attn.fused_attn for block in backbone.net.blocks]
    with torch.inference_mode():
        before = network(images)
        maps = class_activation_maps(network, images)
        assert torch.equal(network(images), before)
    assert maps.shape == (2, CLASSES, 3, 3)  # patches of 16 pixels
    assert torch.equal(maps[:, 0], maps[:, 4])
    assert [block.attn.fused_attn for block in backbone.net.blocks] == fused
