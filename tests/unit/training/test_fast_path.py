"""The fast path against a plain one: the same loss, step by step, on digits.

The plain path shares nothing with the fast one but the weights at the start and the order of the rows: Pillow decodes,
pixels are normalised as floats, the network is computed by its equations in the default memory format, the prior's
batch-norms stay where they are, the losses are written out, and Adam is torch's plain loop over parameters.
"""

import copy
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from csc.config import resolve
from csc.config.schema import Config
from csc.data.dataset import Dataset
from csc.data.ingest.digits import ingest_digits
from csc.data.shards import ImageShards
from csc.data.views import View, train_view
from csc.nets.network import Network
from csc.scenario import Scenario
from csc.training.loop import Trainer
from tests.unit.training.bench import first_rows, fresh_network, grown_network

STEPS = 30
TOLERANCE = 1e-2  # relative, of any single step: rounding grows from step to step; the first ten agree to 1e-4
NEW = 5


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return ingest_digits(tmp_path_factory.mktemp("digits") / "set", train=600, test=20)


@pytest.fixture(scope="module")
def view(digits: Dataset) -> View:
    """Ten batches an epoch, the last one smaller."""
    return first_rows(train_view(digits, Scenario.parse("digits-b0c5").tasks(digits.classes)[1]), 310)


def settings(**train: object) -> Config:
    """The digits preset, at a learning rate at which so many steps do not turn rounding into chaos."""
    return resolve("digits", {"train": {"epochs": 3, "lr": 1e-3, **train}, "cigcn": {"width": 32}})


def fast_losses(config: Config, view: View, network: Network, prior: Network, folder: Path) -> list[dict[str, float]]:
    trainer = Trainer(
        config, view, network, prior, new=NEW, task=2, title="fast", checkpoint_file=folder / "checkpoint.safetensors"
    )
    losses: list[dict[str, float]] = []
    terms = trainer.objective.terms

    def noted(*args):
        found = terms(*args)
        losses.append({name: value.item() for name, value in found.items()})
        return found

    trainer.objective.terms = noted
    trainer.run()
    assert batch_norms(trainer.prior) == 0 < batch_norms(prior)  # folded on the fast path alone
    return losses[:STEPS]


def plain_losses(config: Config, view: View, network: Network, prior: Network) -> list[dict[str, float]]:
    steps = -(-len(view) // config.train.batch_size)
    decayed = [value for value in network.parameters() if value.ndim > 1]
    others = [value for value in network.parameters() if value.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.Adam(groups, lr=config.train.lr, foreach=False, fused=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.train.lr, total_steps=config.train.epochs * steps, pct_start=config.train.pct_start
    )
    images, targets = plain_images(view, config.input.size), torch.from_numpy(view.targets()).float()
    network.train()
    prior.eval()
    losses: list[dict[str, float]] = []
    for epoch in range(config.train.epochs):
        order = np.random.default_rng([config.seed * 1_000 + 2, epoch]).permutation(len(view))
        for start in range(0, len(view), config.train.batch_size):
            rows = order[start : start + config.train.batch_size]
            terms = plain_terms(
                config, plain_logits(network, images[rows]), plain_logits(prior, images[rows]), targets[rows]
            )
            optimizer.zero_grad()
            sum(terms.values()).backward()
            optimizer.step()
            schedule.step()
            losses.append({name: value.item() for name, value in terms.items()})
    return losses[:STEPS]


def plain_images(view: View, size: int) -> Tensor:
    shards = ImageShards(view.shards_uri)
    images = []
    for shard, row in zip(view.table["shard"].to_pylist(), view.table["row"].to_pylist(), strict=True):
        image = Image.open(io.BytesIO(shards.jpeg(shard, row))).convert("RGB").resize((size, size), Image.BILINEAR)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255)
    return (torch.stack(images) - 0.5) / 0.25


def plain_logits(network: Network, images: Tensor) -> Tensor:
    """CI-GCN as the paper and the released network write it, position by position and node by node."""
    head, maps = network.head, network.backbone(images)
    F = maps.flatten(2).transpose(1, 2)
    S = F @ head.class_maps.weight.T
    V0 = S.softmax(dim=1).transpose(1, 2) @ (F @ head.transform.weight.T + head.transform.bias)
    V1 = V0 + leaky_relu(head.W_g(leaky_relu(head.general_cm @ V0, 0.2)), 0.2)
    g = leaky_relu(head.pooled_norm(head.pooled(V1.mean(dim=1))), 0.2)
    copies = g.unsqueeze(1).expand(-1, V1.shape[1], -1)
    A_s = head.specific_cm(torch.cat([copies, V1], dim=2)).sigmoid()
    V2 = leaky_relu(head.W_s(leaky_relu(A_s @ V1, 0.2)), 0.2)
    y_gcn = torch.diagonal((V0 + V2) @ head.output.weight.T + head.output.bias, dim1=1, dim2=2)
    return (S.amax(dim=1) + y_gcn) / 2


def plain_terms(config: Config, logits: Tensor, prior_logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """α CE(new) + (1-α) KD(old) - β H(old)."""
    p, q = logits.sigmoid(), prior_logits.sigmoid().detach()

    def cross_entropy(p: Tensor, y: Tensor) -> Tensor:
        return -(y * p.log() + (1 - y) * (1 - p).log()).mean()

    alpha, beta = config.loss.alpha, config.max_entropy.beta
    old = logits.shape[1] - NEW
    H = -(p[:, :old] * (p[:, :old] + 1e-5).log()).sum(dim=1).mean()
    return {
        "ce": alpha * cross_entropy(p[:, old:], targets[:, old:]),
        "kd": (1 - alpha) * cross_entropy(p[:, :old], q),
        "H": -beta * H,
    }


def batch_norms(network: Network) -> int:
    return sum(isinstance(part, nn.BatchNorm2d) for part in network.backbone.modules())


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["auto", 1])
def test_the_fast_path_has_the_losses_of_the_plain_one(view: View, tmp_path: Path, workers: int | str):
    config = settings(workers=workers)
    prior = fresh_network(config)
    network = grown_network(prior)
    plain = plain_losses(config, view, copy.deepcopy(network), prior)
    fast = fast_losses(config, view, network, prior, tmp_path)
    assert len(plain) == len(fast) == STEPS
    for name in ("ce", "kd", "H"):
        ours, theirs = ([step[name] for step in losses] for losses in (fast, plain))
        np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, err_msg=name)
    assert plain[-1]["ce"] < 0.9 * plain[0]["ce"]  # something was learned
