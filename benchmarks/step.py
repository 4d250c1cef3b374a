"""A training step of CSC, against what the backbone alone costs and against a step in the released form.

The limit of an incremental step is backbone forward, backward and optimiser step for the learner, and backbone forward
for the prior model: what the head, the losses and the loop add is what this project is responsible for. The limit of
the base task is the same without the prior. In the limit both are plain passes of timm's backbone, in the fastest
memory format; that the prior's batch-norms are folded away is part of our step. The released form has what PyTorch and
the C library do by themselves; our steps and their limits keep freed memory (`csc.training.device`).
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, leaky_relu

from benchmarks import Result, interleaved
from csc.config import resolve
from csc.config.schema import Config
from csc.data.loading import Batch, Batches
from csc.data.order import BatchRows
from csc.data.views import View
from csc.methods import build_head
from csc.methods.csc import CigcnSettings
from csc.nets.backbone import build_backbone
from csc.nets.network import Network
from csc.training.device import memory_format, to_device
from csc.training.loop import Trainer

__all__ = ["step"]

OLD, NEW = 4, 4  # task 2 of voc-b0c4
CASES = (("tf_efficientnet_lite0", 128, 32, 256, 6), ("tresnet_m", 224, 8, 1024, 3))  # size, batch, width, rounds
REPEATS = 3  # times that everything is made again: where tensors come to lie in memory is worth some percent
Work = Callable[[], object]
CPU = torch.device("cpu")


def step() -> list[Result]:
    """Images per second of our step, relative to the limit and to the released form."""
    results = []
    for name, size, batch, width, rounds in CASES:
        best = _best(name, size, batch, width, rounds)
        which, limit = f"{name} {size} px, width {width}", "backbone forward, backward, update"
        ours, base = best["incremental"], best["base"]
        results += [
            Result("step", f"task 2 to its limit, {which}", best["limit"] / ours, 0.95, f"{limit}; prior forward"),
            Result("step", f"task 2 to the released form, {which}", best["released"] / ours, 1.6, "the released step"),
            Result("step", f"task 1 to its limit, {which}", best["base limit"] / base, 0.93, limit),
        ]
    return results


def _best(name: str, size: int, batch: int, width: int, rounds: int) -> dict[str, float]:
    """Best seconds of each variant."""
    times = []
    for _ in range(REPEATS):
        with ExitStack() as started:
            works = {variant: started.enter_context(_apart(variant, name, size, batch, width)) for variant in VARIANTS}
            times.append(interleaved(works, rounds))
    return {variant: min(made[variant] for made in times) for variant in VARIANTS}


@contextmanager
def _apart(variant: str, *case: Any) -> Iterator[Work]:
    """A variant in a process of its own: how the memory of one is kept is of no use, and no harm, to another."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, variant, *case), daemon=True)
    process.start()
    theirs.close()

    def work() -> None:
        ours.send(True)
        ours.recv()

    try:
        yield work
    finally:
        ours.close()
        process.join()


def _serve(asked: Connection, variant: str, *case: Any) -> None:
    """Do the work of a variant each time it is asked for."""
    work = VARIANTS[variant](_Case(*case))
    with suppress(EOFError):
        while asked.recv():
            work()
            asked.send(True)


class _Case:
    """One backbone at one size, with the same random batch for all variants."""

    def __init__(self, name: str, size: int, batch: int, width: int) -> None:
        wanted = {"backbone": {"name": name}, "init": "scratch", "cigcn": {"width": width}, "input": {"size": size}}
        self.config: Config = resolve("voc", {**wanted, "train": {"epochs": 1_000}})  # of one step: rounds enough
        self.images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
        self.targets = torch.randint(0, 2, (batch, OLD + NEW)).float()

    def network(self, classes: int) -> Network:
        backbone = build_backbone(self.config.backbone)
        return Network(backbone, build_head(self.config, backbone.channels, (classes,)), (0.5,) * 3, (0.5,) * 3)

    def ours(self, task: int) -> Work:
        """The trainer's own step."""
        old = OLD if task > 1 else 0
        classes = tuple(map(str, range(old + NEW)))
        size = len(self.targets)
        rows = {"image_id": [str(row) for row in range(size)], "shard": [0] * size, "row": range(size)}
        labels = pa.array([[0]] * size, pa.list_(pa.int16()))
        trainer = Trainer(
            self.config,
            View(pa.table({**rows, "labels": labels}), classes, "", ""),
            self.network(old + NEW),
            self.network(old) if old else None,
            new=NEW,
            task=task,
            title="bench",
            checkpoint_file=Path(tempfile.gettempdir()) / "never-written",
        )
        trainer._train_mode()
        images = self.images.contiguous(memory_format=torch.channels_last)  # as the loader makes them
        batch = Batch(images, self.targets[:, : old + NEW], torch.arange(size))
        return lambda: trainer._update(Batches(batch for _ in range(1)), [BatchRows(range(size))])

    def limit(self, *, prior: bool) -> Work:
        """The passes of the backbone alone."""
        learner = to_device(self.network(1), self.config, CPU)
        teacher = self.network(1).eval().to(memory_format=memory_format(self.config, CPU, learns=False))
        optimizer = torch.optim.Adam(learner.backbone.parameters(), fused=True)
        images = self.images.contiguous(memory_format=torch.channels_last)

        def work() -> None:
            if prior:
                with torch.inference_mode():
                    teacher.features(images)
            optimizer.zero_grad(set_to_none=True)
            learner.features(images).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return work

    def released(self) -> Work:
        """The step as the released code writes it: the teacher is part of the graph, and so of the backward pass."""
        learner, teacher = _Released(self, OLD + NEW), _Released(self, OLD).eval()
        optimizer = torch.optim.Adam(learner.parameters())
        images = (self.images.float() / 255 - 0.5) / 0.5

        def work() -> None:
            logits, pseudo = learner(images), teacher(images).sigmoid()
            p = logits.sigmoid()
            loss = 0.15 * binary_cross_entropy_with_logits(logits[:, OLD:], self.targets[:, OLD:])
            loss = loss + 0.85 * binary_cross_entropy_with_logits(logits[:, :OLD], pseudo)
            loss = loss + 0.04 * (p * (p + 1e-5).log()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return work


class _Released(nn.Module):
    """Backbone and CI-GCN as the released code computes them: convolutions over all positions, tensors repeated."""

    def __init__(self, case: _Case, classes: int) -> None:
        super().__init__()
        self.backbone = build_backbone(case.config.backbone)
        channels, width = self.backbone.channels, case.config.group(CigcnSettings).width
        self.class_maps = nn.Conv2d(channels, classes, 1, bias=False)
        self.transform = nn.Conv2d(channels, width, 1)
        self.general_cm = nn.Conv1d(classes, classes, 1, bias=False)
        self.W_g, self.W_s = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.pooled, self.pooled_norm = nn.Conv1d(width, width, 1), nn.BatchNorm1d(width)
        self.specific_cm = nn.Conv1d(2 * width, classes, 1)
        self.output = nn.Conv1d(width, classes, 1)
        self.register_buffer("diagonal", torch.eye(classes))

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images → logits."""
        maps = self.backbone(images)
        scores = self.class_maps(maps).flatten(2)  # (B, n, P)
        V0 = scores.softmax(dim=2) @ self.transform(maps).flatten(2).transpose(1, 2)  # (B, n, D)
        V1 = V0 + leaky_relu(self.W_g(leaky_relu(self.general_cm(V0), 0.2).transpose(1, 2)), 0.2).transpose(1, 2)
        nodes = V1.transpose(1, 2)  # (B, D, n)
        pooled = leaky_relu(self.pooled_norm(self.pooled(nodes.mean(dim=2, keepdim=True))), 0.2)
        specific = self.specific_cm(torch.cat([pooled.expand_as(nodes), nodes], dim=1)).sigmoid()  # (B, n, n)
        V2 = leaky_relu(self.W_s(leaky_relu(nodes @ specific, 0.2)), 0.2)
        y_gcn = (self.output(V0.transpose(1, 2) + V2) * self.diagonal).sum(dim=2)
        logits: Tensor = (scores.amax(dim=2) + y_gcn) / 2
        return logits


VARIANTS: dict[str, Callable[[_Case], Work]] = {
    "incremental": lambda case: case.ours(task=2),
    "limit": lambda case: case.limit(prior=True),
    "released": _Case.released,
    "base": lambda case: case.ours(task=1),
    "base limit": lambda case: case.limit(prior=False),
}
