"""A training step of every method, against the passes that it cannot do without.

The limit of a method is forward, backward and optimiser step of its own network on all its images, exemplars included,
and the prior model's forward pass on the task's images if it asks for one. What losses, memories and the loop add is
what this project is responsible for. Next to it stands the step relative to fine-tuning: what choosing a method costs.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from benchmarks import Result, interleaved
from csc.config import base_method, resolve
from csc.config import methods as all_methods
from csc.config.layers import method_class
from csc.config.schema import Config
from csc.data.loading import Batch, Batches
from csc.data.order import BatchRows, Draw
from csc.data.views import View
from csc.methods import build_head, registered
from csc.nets.backbone import build_backbone
from csc.nets.network import Network
from csc.replay.memory import Memory
from csc.training.device import for_inference, to_device
from csc.training.loop import Trainer

__all__ = ["methods"]

OLD, NEW, BATCH, ROUNDS = 4, 4, 16, 3  # task 2 of voc-b0c4
CLASSES = tuple(map(str, range(OLD + NEW)))
CONVOLUTIONS, TRANSFORMER = ("tf_efficientnet_lite0", 128), ("vit_tiny_patch16_224", 224)  # name, size of images
GOAL = 0.9
REPEATS = 3  # times that everything is made again, as in `benchmarks.step`
Work = Callable[[], object]


def methods() -> list[Result]:
    """Step time of every method: its own passes relative to it, and itself relative to fine-tuning."""
    results = []
    others = [name for name in all_methods() if name != "l2p" and not registered()[base_method(name)].solves]
    for (backbone, size), names in ((CONVOLUTIONS, others), (TRANSFORMER, ["l2p"])):
        best: dict[str, float] = {}
        for _ in range(REPEATS):
            cases = {name: _Case(name, backbone, size) for name in dict.fromkeys(["finetune", *names])}
            steps = {name: case.step() for name, case in cases.items()}
            limits = {f"{name} limit": case.limit() for name, case in cases.items()}
            times = interleaved(steps | limits, ROUNDS)
            best |= {name: min(took, best.get(name, took)) for name, took in times.items()}
        for name in names:
            own, step, plain, which = best[f"{name} limit"], best[name], best["finetune"], f"{backbone} {size} px"
            passes = "its own forward, backward, update; prior forward"
            results += [
                Result("methods", f"{name} to its limit, {which}", own / step, GOAL, passes),
                Result("methods", f"{name} to finetune, {which}", step / plain, None, "a step of finetune", "lower"),
            ]
    return results


class _Case:
    """The second task of one method, with a random batch, and exemplars if the method replays."""

    def __init__(self, method: str, backbone: str, size: int) -> None:
        shared = {"backbone": {"name": backbone}, "input": {"size": size}, "init": "scratch", "cigcn": {"width": 256}}
        self.config: Config = resolve("voc", {"method": method}, shared)
        self.kind = method_class(self.config.method)
        replays = self.config.memory.sampler != "none"
        self.replay_batches = self.kind.replay_batches if replays and self.config.memory.replay == "batch" else 0
        self.memory = _exemplars() if replays else None
        rows = BATCH * (1 + self.replay_batches)
        images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8)
        self.images = images.contiguous(memory_format=torch.channels_last)  # as the loader makes them
        self.targets = torch.randint(0, 2, (rows, OLD + NEW)).float()
        self.rows = torch.arange(rows) % BATCH
        self.rows[BATCH:] += BATCH  # exemplars come behind the task's images

    def step(self) -> Work:
        """The trainer's own step."""
        prior = self._network([OLD]) if self.kind.needs_prior else None
        trainer = Trainer(
            self.config,
            _view(),
            self._network([OLD, NEW]),
            prior,
            new=NEW,
            task=2,
            title="bench",
            checkpoint_file=Path(tempfile.gettempdir()) / "never-written",
            memory=self.memory,
            state=self._state(),
        )
        trainer._train_mode()
        batch = Batch(self.images, self.targets, self.rows)
        rows = BatchRows(range(BATCH), (Draw(range(BATCH), 1),) * self.replay_batches)
        return lambda: trainer._update(Batches(batch for _ in range(1)), [rows])

    def limit(self) -> Work:
        """The passes of the networks alone, in the same memory format."""
        device = torch.device("cpu")
        learner = to_device(self._network([OLD, NEW]), self.config, device).train()
        prior = for_inference(self._network([OLD]), self.config, device) if self.kind.needs_prior else None
        trained = [value for value in learner.parameters() if value.requires_grad]
        optimizer = torch.optim.Adam(trained, fused=True)

        def work() -> None:
            if prior is not None:
                with torch.inference_mode():
                    prior(self.images[:BATCH])
            optimizer.zero_grad(set_to_none=True)
            learner(self.images).mean().backward()
            optimizer.step()

        return work

    def _network(self, task_sizes: list[int]) -> Network:
        backbone = method_class(self.config.method).wrap(self.config, build_backbone(self.config.backbone))
        return Network(backbone, build_head(self.config, backbone.channels, task_sizes), (0.5,) * 3, (0.5,) * 3)

    def _state(self) -> dict[str, torch.Tensor]:
        """What the method keeps between tasks, where its step depends on it."""
        if self.config.method in ("krt", "krt-r"):
            return {"threshold": torch.tensor(0.8)}
        if self.config.method == "oewc":
            weights = self._network([OLD]).named_parameters()
            kept = {name: value.detach() for name, value in weights}
            return {f"{part}.{name}": value for name, value in kept.items() for part in ("fisher", "star")}
        return {}


def _view() -> View:
    rows = {"image_id": [str(row) for row in range(BATCH)], "shard": [0] * BATCH, "row": range(BATCH)}
    labels = pa.array([[OLD]] * BATCH, pa.list_(pa.int16()))
    columns = {"image_id": pa.string(), "shard": pa.int32(), "row": pa.int32()}
    table = pa.table({name: pa.array(values, columns[name]) for name, values in rows.items()} | {"labels": labels})
    return View(table, CLASSES, "", "")


def _exemplars() -> Memory:
    """A memory with a batch of images of the first task, and what a model said of them."""
    view, empty = _view(), Memory.empty("")
    return Memory(
        table=view.table.select(["image_id", "shard", "row"]),
        labels=np.zeros((BATCH, OLD + NEW), bool),
        known=np.tile(np.array([0, OLD + NEW], np.int32), (BATCH, 1)),
        owner=np.zeros(BATCH, np.int16),
        rank=np.arange(BATCH, dtype=np.int32),
        logits=np.zeros((BATCH, OLD + NEW), np.float32),
        stored=np.full(BATCH, OLD, np.int32),
        counts=np.zeros(OLD + NEW, np.int64),
        seen=0,
        classes=CLASSES,
        fingerprint=empty.fingerprint,
    )
