"""Statistics replay: mean and spread of old classes' features instead of their images."""

from typing import cast

import pytest
import torch

from csc.config import resolve
from csc.errors import BadConfig, BadModel
from csc.nets.ci_gcn import CIGCN
from csc.replay.statistics import sample_features, with_statistics
from tests.unit.training.bench import Bench, first_rows, fresh_network, grown_network, one_line, settings

ON = ("backbone.frozen=true", "statistics.replay=true", "train.epochs=1")


def members_of(images: int = 400) -> list[torch.Tensor]:
    """Features of the images of three classes; one has no image."""
    dice = torch.Generator().manual_seed(0)
    labels = (torch.rand(images, 3, generator=dice) < 0.5).float()
    labels[:, 2] = 0
    features = torch.randn(images, 4, generator=dice) + 5 * labels[:, :1]
    return [features[present > 0] for present in labels.T]


def test_each_class_keeps_the_mean_and_the_spread_of_its_own_images():
    members = members_of()
    state = with_statistics({"other": torch.ones(1)}, members)
    own = members[1].double()
    torch.testing.assert_close(state["statistics.mean"][1], own.mean(0))
    torch.testing.assert_close(state["statistics.std"][1], own.std(0, correction=0))
    assert state["statistics.images"].tolist() == [len(members[0]), len(members[1]), 0]
    more = with_statistics(state, members[:1])
    assert len(more["statistics.mean"]) == 4
    assert torch.equal(more["statistics.mean"][:3], state["statistics.mean"])
    assert torch.equal(more["other"], state["other"])


def test_drawn_features_have_the_statistics_of_classes_that_had_images():
    state = with_statistics({}, members_of())
    torch.manual_seed(0)
    drawn = sample_features(state, 4000)
    expected = state["statistics.mean"][:2].mean(0).float()
    torch.testing.assert_close(drawn.mean(0), expected, rtol=0, atol=0.15)
    torch.manual_seed(0)
    assert torch.equal(sample_features(state, 4000), drawn)


@pytest.mark.parametrize("name", ["lwf", "csc", "agcn", "krt"])
def test_a_method_with_a_prior_learns_from_drawn_features(name: str, bench: Bench):
    config = settings(f"method={name}", *ON, *(("krt.width=16", "krt.heads=2") if name == "krt" else ()))
    base = bench.trainer(config, network := fresh_network(config), view=first_rows(bench.views[1], 16))
    assert "drawn" not in base.run()[0]
    assert len(base.method.state["statistics.mean"]) == 5
    second = bench.trainer(config, grown_network(network), task=2, prior=network.eval(), state=base.method.state)
    log = second.run()[0]
    assert log["drawn"] > 0
    assert log["loss"] == pytest.approx(sum(log[name] for name in log if name not in MEASURED))
    assert len(second.method.state["statistics.mean"]) == 10


def test_statistics_under_masks_are_of_what_a_class_is_read_from(bench: Bench):
    config = settings("method=csc", *ON, "statistics.pooling=masks")
    trainer = bench.trainer(config, fresh_network(config), view=first_rows(bench.views[1], 16))
    objective = trainer.objective
    head, labels = cast(CIGCN, trainer.network.head), objective.labels()
    V0 = objective.features(lambda maps: v0_of(head, maps))
    for c, members in enumerate(objective.features_of_new_classes()):
        torch.testing.assert_close(head.transform(members), V0[labels[:, c] > 0, c], rtol=1e-4, atol=1e-5)


def v0_of(head: CIGCN, maps: torch.Tensor) -> torch.Tensor:
    F = maps.flatten(2).transpose(1, 2)
    return head.label_nodes(head.masks(head.class_maps(F)), F)


MEASURED = ("loss", "images_per_second", "waiting")


def test_a_backbone_that_learns_and_a_prior_without_statistics_are_refused(bench: Bench):
    with pytest.raises(BadConfig, match=r"statistics\.replay=true: features of a backbone") as error:
        resolve("voc", {"method": "lwf", "statistics": {"replay": True}})
    assert one_line(error)
    with pytest.raises(BadConfig, match=r"statistics\.pooling=masks: head 'linear' has no masks"):
        settings("method=lwf", *ON, "statistics.pooling=masks")
    config = settings("method=lwf", *ON)
    with pytest.raises(BadModel, match="the prior model has no statistics"):
        bench.second(config)
