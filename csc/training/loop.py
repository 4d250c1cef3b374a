"""The loop that trains one task, from the first batch to the last checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from csc.config.schema import Config
from csc.data.loading import Batches
from csc.data.progress import Progress
from csc.data.views import View
from csc.distributed.group import Group, no_sync, single_process
from csc.errors import BadData
from csc.methods import method
from csc.nets.network import Network
from csc.replay.memory import Memory
from csc.training.checkpoint import Checkpoint
from csc.training.device import for_inference, to_device
from csc.training.examples import Examples
from csc.training.objective import Objective
from csc.training.optimiser import inherit_moments, make_optimizer, make_schedule
from csc.training.precision import Precision

__all__ = ["EpochLog", "Trainer"]

EpochLog = dict[str, float]


@dataclass
class Trainer:
    """One task: a network that learns, a view to learn from, and the model before as teacher.

    Attributes:
        network: already grown to the classes of the view.
        prior: model of the task before, if the method asks for it.
        new: how many of the view's classes are new.
        title: how the progress line names the task.
        checkpoint: file that keeps the state between epochs.
        origin: names what the network starts from and its teacher; a checkpoint of another origin is not resumed.
        frozen_parameters: names that must not learn (grown layers under the release's quirk).
        optimizer_state: moments of the task before to start with (under the release's quirk).
        features: place of cached feature maps that come in the place of images; none if empty.
        memory: exemplars of earlier tasks, as this task may see them.
        state: what the method kept of earlier tasks.
        group: the processes that train together.
        on_epoch: called with (epoch from 0, log) after each epoch that is finished here.
    """

    config: Config
    view: View
    network: Network
    prior: Network | None
    new: int
    task: int
    title: str
    checkpoint: Path
    origin: str = ""
    frozen_parameters: tuple[str, ...] = ()
    optimizer_state: Path | None = None
    features: str = ""
    memory: Memory | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    group: Group = field(default_factory=single_process)
    on_epoch: Callable[[int, EpochLog], None] = lambda epoch, log: None

    def __post_init__(self) -> None:
        if len(self.view) < 2:
            raise BadData(f"{self.title}: one training image; batch-norm needs at least two")
        config, device = self.config, self.group.device
        self.method = method(config, self.state)
        self.is_base = self.task == 1 or not self.method.continues  # the network has learned nothing so far
        draws = self.method.draws
        self.examples = Examples(config, self.view, self.task, self.memory, draws, self.features, self.group)
        self.group.sync_batch_norms(self.network)
        to_device(self.network, config, device)
        if self.prior is not None:
            self.prior = for_inference(self.prior, config, device)
        self._freeze()
        self.optimizer = make_optimizer(
            self.network, config.train, config.train.lr_base if self.is_base else config.train.lr
        )
        if self.optimizer_state is not None:
            inherit_moments(self.optimizer, self.network, self.optimizer_state)
        self.steps = -(-len(self.examples.order(0)) // config.train.accumulate)  # of an epoch
        self.scheduler = make_schedule(self.optimizer, config.train, config.train.epochs * self.steps)
        self.precision = Precision.of(config, device)
        self.objective = Objective(
            config, self.method, self.network, self.prior, self.new, self.examples, self.precision
        )

    def run(self) -> list[EpochLog]:
        """Train all epochs, resuming an earlier try after its last checkpoint; return one log per epoch."""
        self.objective.begin()
        if self.method.solves:
            return [self._solve()]
        view = self.examples.view
        key = self.config.fingerprint(view.fingerprint, self.origin, str(self.task), *view.classes)
        keeper = Checkpoint(self.checkpoint, key, self.network, self.optimizer, self.scheduler, self.precision.scaler)
        log = keeper.restore()
        if not self.group.agree(len(log)):
            raise BadData(f"{self.checkpoint}: not seen alike by all processes; put it where all nodes can read it")
        progress = Progress(self.title, self.config.train.epochs, self.examples.shown, finished=len(log))
        epochs = range(len(log), self.config.train.epochs)
        batches = self.examples.batches(epochs)
        for epoch in epochs:
            terms, speed = self._epoch(epoch, batches, progress)
            log.append({**terms, "loss": sum(terms.values()), **speed})
            if self.group.is_main:
                keeper.save(log)
                progress.epoch(epoch, terms)
                self.on_epoch(epoch, log[-1])
        self.objective.finish()
        return log

    def _solve(self) -> EpochLog:
        """One pass over the images instead of epochs; a try that died begins again."""
        started = time.monotonic()
        terms = self.method.solve(self.objective)
        speed = self.examples.own / (time.monotonic() - started)
        log = {**terms, "loss": sum(terms.values()), "images_per_second": speed, "waiting": 0.0}
        if self.group.is_main:
            print(f"{self.title} · solved from {self.examples.own:,} images · {speed:.0f} images/s", flush=True)
            self.on_epoch(0, log)
        self.objective.finish()
        return log

    def _epoch(self, epoch: int, batches: Batches, progress: Progress) -> tuple[EpochLog, EpochLog]:
        """One pass over the view: the mean of each term, and how fast it went.

        Terms are added up on the device and read once, at the end: reading makes the host wait.
        """
        self._train_mode()
        started, waited = time.monotonic(), batches.waited
        order, accumulate = self.examples.order(epoch), self.config.train.accumulate
        total: dict[str, Tensor] = {}
        for start in range(0, len(order), accumulate):
            update = order[start : start + accumulate]
            for name, value in self._step(batches, [[len(draw.rows) for draw in draws] for draws in update]).items():
                total[name] = total[name] + value if name in total else value
            if self.group.is_main:
                progress.advance(epoch, sum(len(draws[0].rows) for draws in update))
        terms = {name: float(value) / self.steps for name, value in total.items()}
        seconds = time.monotonic() - started
        waiting = (batches.waited - waited) / seconds
        return terms, {"images_per_second": self.examples.shown / seconds, "waiting": waiting}

    def _step(self, batches: Batches, sizes: list[list[int]]) -> dict[str, Tensor]:
        """One update from one batch, or from several that are accumulated; return the terms, still on the device.

        Args:
            batches: where the next ones come from.
            sizes: of each batch how many rows are the task's, and how many of each draw from the memory.
        """
        scaler = self.precision.scaler
        self.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        images = sum(size[0] for size in sizes)
        for number, size in enumerate(sizes, start=1):
            batch, share = next(batches).to(self.group.device), size[0] / images
            with no_sync(self.objective.learner, unless=number == len(sizes)):
                terms = self.objective.terms(batch, size, share)
                loss = torch.stack(list(terms.values())).sum() * share
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for name, value in terms.items():
                total[name] = total.get(name, 0) + value.detach() * share
        if self.config.train.clip:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.train.clip)
        scaler.step(self.optimizer)
        scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def _freeze(self) -> None:
        """Keep from learning: a frozen backbone, and the parameters that the caller or the method names."""
        if self.config.backbone.frozen:
            self.network.backbone.requires_grad_(False)
        frozen = self.method.frozen(self.network) if self.task > 1 else ()
        for name in (*self.frozen_parameters, *frozen):
            self.network.get_parameter(name).requires_grad_(False)

    def _train_mode(self) -> None:
        """Training mode, but for what is frozen: a frozen backbone, and batch-norm under the release's quirk."""
        self.network.train()
        if self.config.backbone.frozen:
            self.network.backbone.eval()
        if self.config.release_quirks.freeze_bn_after_base and not self.is_base:
            for module in self.network.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
