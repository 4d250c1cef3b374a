"""A small training setting that the tests here share: settings, networks, models, and a trainer on demand."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from csc.config import parse_overrides, resolve
from csc.config.layers import method_class
from csc.config.schema import Config
from csc.data.loading import Batches, Workers, image_batches
from csc.data.order import BatchRows
from csc.data.views import View
from csc.errors import CscError
from csc.methods import build_head
from csc.model import ModelCard, save_network
from csc.nets.backbone import Initialisation, build_backbone
from csc.nets.head import grow
from csc.nets.network import Network
from csc.scenario import Task
from csc.training.checkpoint import EpochLog
from csc.training.loop import Trainer

SCENARIO = "digits-b0c5"
ROWS, NEW = 20, 5
TINY = (
    "backbone.name=test_resnet",
    "backbone.output_stride=16",
    "input.size=32",
    "train.epochs=2",
    "train.batch_size=8",
    "train.workers=0",
    "train.channels_last=off",
    "cigcn.width=8",
)
LINEAR = "head=linear"


def settings(*items: str) -> Config:
    """A configuration that trains in a moment; csc unless told otherwise."""
    return resolve("digits", parse_overrides(items), shared=parse_overrides(TINY))


def first_rows(view: View, rows: int) -> View:
    return dataclasses.replace(view, table=view.table.take(list(range(rows))))


def plain(view: View, batches: Sequence[Sequence[int]], *, size: int, workers: Workers, mode: str = "fast") -> Batches:
    """Batches of the given rows, without augmentation."""
    plan = [(0, [BatchRows(rows) for rows in batches])]
    return image_batches(view, plan, seed=0, size=size, augment=False, workers=workers, mode=mode)


def fresh_network(config: Config, classes: int = NEW, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    backbone = build_backbone(config.backbone)
    return Network(backbone, build_head(config, backbone.channels, [NEW] * (classes // NEW)), (0.5,) * 3, (0.25,) * 3)


def grown_network(prior: Network, classes: int = 2 * NEW, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    network = copy.deepcopy(prior)
    network.head = grow(prior.head, classes)
    return network


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: nn.Module) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def without_speed(log: list[EpochLog]) -> list[EpochLog]:
    return [
        {name: value for name, value in epoch.items() if name not in ("images_per_second", "waiting")} for epoch in log
    ]


@dataclasses.dataclass
class Bench:
    """Makes trainers that share views and one checkpoint file."""

    views: dict[int, View]
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "task.safetensors"

    def trainer(self, config: Config, network: Network | None = None, task: int = 1, **more) -> Trainer:
        options = {"view": self.views[task], "prior": None, "checkpoint_file": self.checkpoint} | more
        return Trainer(config, network=network or fresh_network(config), new=NEW, task=task, title="task", **options)

    def second(self, config: Config, seed: int = 0, **more) -> Trainer:
        """A trainer of the second task, with the model before it as prior if the method asks for one."""
        prior = fresh_network(config)
        network = grown_network(prior, seed=seed)
        needs_prior = method_class(config.method).needs_prior
        return self.trainer(config, network, task=2, prior=prior.eval() if needs_prior else None, **more)


def one_line(error: pytest.ExceptionInfo[CscError]) -> bool:
    text = str(error.value)
    return bool(text) and "\n" not in text


def card_of(config: Config, task: Task) -> ModelCard:
    return ModelCard(
        method=config.method,
        scenario=SCENARIO,
        task=task.index,
        tasks=task.total,
        classes=task.seen,
        new=task.new,
        config=json.loads(config.to_json()),
        initialisation=dataclasses.asdict(Initialisation("scratch", "random", "")),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        data_fingerprint="data",
        prior_fingerprint="",
        code_version="test",
    )


def saved_model(folder: Path, config: Config, task: Task, network: Network | None = None) -> Path:
    folder.mkdir()
    save_network(network or fresh_network(config, len(task.seen)), card_of(config, task), folder)
    return folder


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
