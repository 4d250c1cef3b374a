"""L2P: which prompts an image gets, what they do, and that the transformer stays as it was."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from csc.config import resolve
from csc.errors import BadConfig
from csc.methods.base import LossInputs
from csc.methods.l2p import L2P, L2pSettings
from csc.nets.backbone import Backbone, build_backbone
from csc.nets.head import LinearHead
from csc.nets.network import Network, Outputs
from csc.nets.prompts import PromptedBackbone

BATCH, SIZE, POOL, LENGTH, CHOSEN = 4, 48, 6, 3, 2
CONFIG = L2pSettings(pool=POOL, length=LENGTH, chosen=CHOSEN)
WIDTH = 64  # of test_vit
OLD, NEW = 3, 2


def prompted(config: L2pSettings = CONFIG, seed: int = 0) -> PromptedBackbone:
    torch.manual_seed(seed)
    return PromptedBackbone(build_backbone(resolve("digits", {"method": "l2p"}).backbone), config)


def images(batch: int = BATCH, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def network_of(backbone: PromptedBackbone) -> Network:
    return Network(backbone, LinearHead(WIDTH, OLD + NEW), (0.5,) * 3, (0.5,) * 3)


def uint8_images(batch: int = BATCH) -> Tensor:
    return torch.randint(0, 256, (batch, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


# Choosing prompts


def test_in_training_the_batch_votes_for_the_prompts_of_all():
    backbone = prompted().train()
    liked = [(0, 1), (1, 4), (4, 2), (5, 1)]  # by votes: 1 thrice, 4 twice, the others once
    cosines = torch.zeros(BATCH, POOL)
    for image, pair in enumerate(liked):
        cosines[image, list(pair)] = torch.tensor([0.9, 0.8])
    assert backbone.choose(cosines).tolist() == [[1, 4]] * BATCH


def test_votes_are_counted_prompt_by_prompt():
    backbone, cosines = prompted().train(), torch.rand(50, POOL, generator=torch.Generator().manual_seed(3))
    votes = cosines.topk(CHOSEN, dim=1).indices.flatten().bincount(minlength=POOL)
    winners = votes.argsort(descending=True, stable=True)[:CHOSEN]
    assert backbone.choose(cosines).tolist() == [winners.tolist()] * 50


def test_the_vote_is_that_of_the_batch_of_all_processes(monkeypatch: pytest.MonkeyPatch):
    others = torch.tensor([0, 0, 5, 0, 0, 4])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda votes: votes.add_(others))
    cosines = torch.tensor([[0.9, 0.8, 0, 0, 0, 0]])
    assert prompted().train().choose(cosines).tolist() == [[2, 5]]
    assert prompted().eval().choose(cosines).tolist() == [[0, 1]]


def test_in_evaluation_each_image_has_the_prompts_nearest_to_it():
    backbone = prompted().eval()
    cosines = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0, 0], [0.7, 0, 0, 0, -1, 0.9]])
    assert backbone.choose(cosines).tolist() == [[1, 3], [5, 0]]


@torch.no_grad()
def test_a_prediction_does_not_depend_on_the_other_images_of_its_batch():
    backbone = prompted().eval()
    together, alone = backbone(images()), torch.cat([backbone(image) for image in images().split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_an_empty_part_of_a_batch_passes(training: bool):
    net = timm.create_model("test_vit", num_classes=0, global_pool="", img_size=SIZE, dynamic_img_size=False)
    maps, _, pull = PromptedBackbone(Backbone(net), CONFIG).train(training).intermediates(images(0))
    assert (maps.shape, pull.shape) == ((0, WIDTH, 1, 1), (0,))


# What they do


def by_hand(backbone: PromptedBackbone, image: Tensor, choice: list[int]) -> tuple[Tensor, Tensor]:
    """Feature and pull of one image (3, H, W) with the prompts of a choice, block by block."""
    net, image = backbone.net, image[None]
    patches = net.patch_embed.proj(image).flatten(2).transpose(1, 2)
    table = timm.layers.resample_abs_pos_embed(net.pos_embed, (SIZE // 16, SIZE // 16), num_prefix_tokens=1)
    tokens = torch.cat([net.cls_token, patches], dim=1) + table
    query = tokens
    for block in net.blocks:
        query = block(query)
    query = net.norm(query)[0, 0]
    sequence = torch.cat([tokens[:, :1], *(backbone.prompts[i][None] for i in choice), tokens[:, 1:]], dim=1)
    for block in net.blocks:
        sequence = block(sequence)
    outputs = net.norm(sequence)[0, 1 : 1 + len(choice) * LENGTH]
    pull = sum(query @ backbone.keys[i] / (query.norm() * backbone.keys[i].norm()) for i in choice)
    return outputs.mean(dim=0), pull


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_the_feature_is_the_mean_output_of_the_chosen_prompts(training: bool):
    backbone = prompted().train(training)
    maps, stages, pull = backbone.intermediates(images())
    assert maps.shape == (BATCH, WIDTH, 1, 1)
    assert len(stages) == 1
    assert stages[0] is maps
    query = backbone.net.forward_features(images())[:, 0]
    cosines = nn.functional.cosine_similarity(query[:, None], backbone.keys, dim=2)
    choice = backbone.choose(cosines).tolist()
    for image in range(BATCH):
        feature, similarity = by_hand(backbone, images()[image], choice[image])
        torch.testing.assert_close(maps[image].flatten(), feature, rtol=1e-4, atol=1e-5)
        assert pull[image].item() == pytest.approx(similarity.item(), abs=1e-5)
    torch.testing.assert_close(backbone(images()), maps)


def test_pool_and_keys_start_uniform_between_minus_one_and_one():
    backbone = prompted(L2pSettings())
    assert backbone.prompts.shape == (10, 5, WIDTH)
    assert backbone.keys.shape == (10, WIDTH)
    for value in (backbone.prompts.detach(), backbone.keys.detach()):
        assert 0.95 < value.abs().max() <= 1
        assert float(value.std()) == pytest.approx(3**-0.5, rel=0.1)


def test_a_backbone_without_class_token_is_refused():
    plain = build_backbone(resolve("digits", {"method": "lwf"}).backbone)
    with pytest.raises(BadConfig, match=r"head=prompts: .* backbone.name=test_resnet"):
        PromptedBackbone(plain, CONFIG)
    pooled = timm.create_model("test_vit", num_classes=0, global_pool="", class_token=False)
    with pytest.raises(BadConfig, match="class token"):
        PromptedBackbone(Backbone(pooled), CONFIG)


# What learns


def test_only_chosen_prompts_their_keys_and_the_head_have_gradients():
    network = network_of(prompted()).train()
    outputs = network(uint8_images(), intermediates=True)
    (outputs.logits.square().sum() - outputs.pull.sum()).backward()
    backbone = network.backbone
    assert all(value.grad is None for value in backbone.net.parameters())
    chosen = backbone.prompts.grad.flatten(1).abs().amax(dim=1) > 0
    assert int(chosen.sum()) == CHOSEN
    assert torch.equal(backbone.keys.grad.abs().amax(dim=1) > 0, chosen)
    assert all(value.grad.abs().max() > 0 for value in network.head.parameters())


def test_keys_learn_from_the_pull_alone_and_prompts_from_the_labels_alone():
    network = network_of(prompted()).train()
    backbone = network.backbone
    outputs = network(uint8_images(), intermediates=True)
    both = (backbone.prompts, backbone.keys)
    of_logits = torch.autograd.grad(outputs.logits.sum(), both, retain_graph=True, allow_unused=True)
    of_pull = torch.autograd.grad(outputs.pull.sum(), both, allow_unused=True)
    assert (of_logits[1], of_pull[0]) == (None, None)
    assert of_logits[0].abs().max() > 0
    assert of_pull[1].abs().max() > 0


def test_the_transformer_is_bit_equal_after_training():
    network = network_of(prompted()).train()
    method = L2P(resolve("digits", {"method": "l2p"}))
    assert not any(module.training for module in network.backbone.net.modules())
    assert network.backbone.training
    before = {name: value.detach().clone() for name, value in network.state_dict().items()}
    learning = [value for value in network.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=0.01)
    targets = torch.eye(OLD + NEW)[:BATCH]
    for _ in range(3):
        optimizer.zero_grad()
        outputs = network(uint8_images(), intermediates=True)
        step = LossInputs(outputs.logits, targets, NEW, distances=method.distances(outputs, None))
        torch.stack(list(method.loss(step).values())).sum().backward()
        optimizer.step()
    moved = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"backbone.prompts", "backbone.keys", "head.linear.weight", "head.linear.bias"}
    assert torch.equal(network.head.linear.weight[:OLD], before["head.linear.weight"][:OLD])
    assert {name for name in before if name.startswith("backbone.net.")}


# The loss


def test_the_loss_is_that_of_the_new_classes_less_the_weighted_pull():
    method = L2P(resolve("voc", {"method": "l2p", "l2p": {"pull": 0.5}}))
    logits = torch.randn(BATCH, OLD + NEW, requires_grad=True)
    targets = torch.randint(0, 2, (BATCH, OLD + NEW)).float()
    pull = torch.tensor([1.0, 2.0, 3.0, 6.0])
    outputs = Outputs(logits, logits, (), pull)
    terms = method.loss(LossInputs(logits, targets, NEW, distances=method.distances(outputs, None)))
    assert list(terms) == ["ce", "pull"]
    assert terms["pull"].item() == -0.5 * 3
    assert torch.equal(terms["ce"], binary_cross_entropy_with_logits(logits[:, OLD:], targets[:, OLD:]))
    slope = torch.autograd.grad(terms["ce"], logits)[0]
    assert slope[:, :OLD].abs().max() == 0


def test_the_settings_are_those_of_the_paper():
    for dataset, batch in (("coco", 64), ("voc", 64), ("digits", 32)):
        config = resolve(dataset, {"method": "l2p"})
        train = config.train
        assert train.batch_size == batch
        assert train.lr == train.lr_base == pytest.approx(0.03 * batch / 256)
        assert (train.schedule, train.clip, train.weight_decay) == ("constant", 1.0, 0)
        assert (config.head, config.l2p) == ("prompts", L2pSettings(pool=10, length=5, chosen=5, pull=0.1))


def test_its_backbone_cannot_be_frozen_as_a_whole():
    with pytest.raises(BadConfig, match=r"backbone\.frozen=true: method 'l2p'"):
        resolve("voc", {"method": "l2p", "backbone": {"frozen": True}})
