"""The loop that trains one task, from the first batch to the last checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from csc.config.schema import Config
from csc.data.loading import Batches
from csc.data.order import BatchRows
from csc.data.progress import Progress
from csc.data.views import View
from csc.distributed.group import Group, no_sync, single_process
from csc.errors import BadData, BadModel, NotFinite
from csc.methods import HEADS, build_method
from csc.nets.head import Head
from csc.nets.network import Network
from csc.replay.memory import Memory
from csc.storage import atomic_file
from csc.training.checkpoint import Checkpoint, EpochLog, ResumePoint
from csc.training.device import Precision, for_inference, to_device
from csc.training.examples import Examples
from csc.training.finite import FiniteWatch
from csc.training.objective import Objective
from csc.training.optimiser import inherit_moments, make_optimizer, make_schedule
from csc.training.stopping import STOPPED, StopRequest, stop_request

__all__ = ["Trainer"]


@dataclass
class Trainer:
    """One task: a network that learns, a view to learn from, and the prior model."""

    config: Config
    view: View
    network: Network  # already grown to the classes of the view
    prior: Network | None  # if the method asks for it
    new: int  # how many of the view's classes are new
    task: int
    title: str  # how the progress line names the task
    checkpoint_file: Path  # file that keeps the state between epochs
    lineage: str = ""  # of the network and the prior; a checkpoint of another lineage is not resumed
    frozen_parameters: tuple[str, ...] = ()  # that must not learn (grown layers under the release's quirk)
    moments: Path | None = None  # of the task before to start with (under the release's quirk)
    maps_uri: str = ""  # uri of cached feature maps that replace the images
    memory: Memory | None = None  # exemplars of earlier tasks, as this task may see them
    state: Mapping[str, Tensor] = field(default_factory=dict)  # what the method kept of earlier tasks
    group: Group = field(default_factory=single_process)  # the processes that train together
    on_epoch: Callable[[int, EpochLog], None] = lambda epoch, log: None  # epoch from 0; after each finished here

    def __post_init__(self) -> None:
        if len(self.view) < 2:
            raise BadData(f"{self.title}: one training image; batch-norm needs at least two")
        config, device = self.config, self.group.device
        self.method = build_method(config, self.state)
        self.is_base = self.task == 1 or not self.method.continues  # the network has learned nothing so far
        self.backbone_is_frozen = not config.backbone.learns(is_base=self.is_base)
        replays = self.method.replay_batches
        self.examples = Examples(config, self.view, self.task, self.memory, replays, self.maps_uri, self.group)
        self.closed_form_head = self.network.head if self.method.solves else None
        if self.closed_form_head is not None and not self.backbone_is_frozen:
            # The backbone is trained under a linear head; `_solve` puts the closed-form head in its place.
            self.network.head = HEADS["linear"].build(config, self.network.backbone.channels, (self.new,))
        self.group.sync_batch_norms(self.network)
        to_device(self.network, config, device)
        if self.prior is not None:
            self.prior = for_inference(self.prior, config, device)
        self._freeze()
        rate = config.train.lr_base if self.is_base else config.train.lr
        self.optimizer = make_optimizer(self.network, config.train, rate)
        if self.moments is not None:
            inherit_moments(self.optimizer, self.network, self.moments)
        self.updates_per_epoch = -(-len(self.examples.epoch_rows(0)) // config.train.accumulate)
        self.scheduler = make_schedule(self.optimizer, config.train, config.train.epochs * self.updates_per_epoch)
        self.precision = Precision.of(config, device)
        networks = self.network, self.prior
        self.objective = Objective(
            config, self.method, *networks, self.new, self.examples, self.precision, self.backbone_is_frozen
        )
        self.watch = FiniteWatch(device)
        view = self.examples.view
        key = config.fingerprint(view.fingerprint, self.lineage, str(self.task), *view.classes)
        moving = self.network, self.optimizer, self.scheduler, self.precision.scaler
        self.checkpoint = Checkpoint(self.checkpoint_file, key, *moving)

    def run(self) -> list[EpochLog]:
        """Train the task: its epochs, and the closed form of a method that has one; return one log for each.

        A frozen backbone under a closed form has no epochs.
        """
        self.objective.begin()
        log = [] if self.closed_form_head is not None and self.backbone_is_frozen else self._train_epochs()
        if self.closed_form_head is not None:
            log = [*log, self._solve(self.closed_form_head, len(log))]
        self.method.finish(self.objective)
        return log

    def _train_epochs(self) -> list[EpochLog]:
        """Train all epochs, resuming an earlier try from its checkpoint.

        A process that is asked to stop (SIGTERM) saves a checkpoint after the update under way and ends with code 143.
        """
        position = self._restore()
        finished = len(position.log) + position.updates / self.updates_per_epoch
        progress = Progress(self.title, self.config.train.epochs, self.examples.images_per_epoch, finished=finished)
        epochs = range(len(position.log), self.config.train.epochs)
        batches = self.examples.batches(epochs, skip=position.updates * self.config.train.accumulate)
        with stop_request() as request:
            for epoch in epochs:
                terms, speed = self._epoch(batches, progress, position, request)
                position = ResumePoint([*position.log, {**terms, "loss": sum(terms.values()), **speed}])
                if self.group.is_main:
                    self.checkpoint.save(position)
                    progress.epoch(epoch, terms)
                    self.on_epoch(epoch, position.log[-1])
        return position.log

    def _epoch(
        self, batches: Batches, progress: Progress, position: ResumePoint, request: StopRequest
    ) -> tuple[EpochLog, EpochLog]:
        """One pass over the view, or the rest of one: the mean of each term, and how fast it went.

        Terms are added up on the device and read once, at the end: reading makes the host wait.
        """
        self._train_mode()
        epoch, images = len(position.log), 0
        started, waited = time.monotonic(), batches.waited
        order, accumulate = self.examples.epoch_rows(epoch), self.config.train.accumulate
        updates = [order[start : start + accumulate] for start in range(0, len(order), accumulate)]
        self.watch = FiniteWatch(self.group.device, skipped=position.updates)
        for update in updates[position.updates :]:
            position.add(self._update(batches, update))
            shown = sum(len(rows.own) for rows in update)
            images += shown
            if self.watch.is_due():
                self._check_finite(epoch, updates)
            if self.group.any(request.received):
                self._check_finite(epoch, updates)
                self._stop(position)
            if self.group.is_main:
                progress.advance(epoch, shown)
        self._check_finite(epoch, updates)
        terms = {name: float(value) / self.updates_per_epoch for name, value in position.terms.items()}
        seconds = time.monotonic() - started
        waiting = (batches.waited - waited) / seconds
        return terms, {"images_per_second": images / seconds, "waiting": waiting}

    def _update(self, batches: Batches, update: list[BatchRows]) -> dict[str, Tensor]:
        """One update from one batch, or from several that are accumulated; return the terms, still on the device."""
        scaler = self.precision.scaler
        self.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        images = sum(len(rows.own) for rows in update)
        for index, rows in enumerate(update):
            batch, share = next(batches).to(self.group.device), len(rows.own) / images
            with no_sync(self.objective.learner, unless=index == len(update) - 1):
                terms = self.objective.terms(batch, rows, [*update[:index], *update[index + 1 :]])
                loss = torch.stack(list(terms.values())).sum() * share
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for name, value in terms.items():
                total[name] = total.get(name, 0) + value.detach() * share
        loss = torch.stack(list(total.values())).sum()
        rate = max(group["lr"] for group in self.optimizer.param_groups)
        self.watch.look(loss, self._clip(), rate)
        scaler.step(self.optimizer)
        scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def _clip(self) -> Tensor | None:
        """Clip the gradient if the settings say so and return its norm; None in float16, where it may overflow.

        The scaler leaves out an update that overflows, and makes the scale smaller.
        """
        clip, scaler = self.config.train.clip, self.precision.scaler
        if clip:
            scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.network.parameters(), clip)
        elif not scaler.is_enabled():
            gradients = [value.grad for value in self.network.parameters() if value.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        return None if scaler.is_enabled() else norm

    def _solve(self, head: Head, epoch: int) -> EpochLog:
        """One pass over the images gives the head its weights; a try that died begins this pass again."""
        self.network.head = head.to(self.group.device)
        started = time.monotonic()
        terms = self.method.solve(self.objective)
        speed = self.examples.task_rows / (time.monotonic() - started)
        log = {**terms, "loss": sum(terms.values()), "images_per_second": speed, "waiting": 0.0}
        if self.group.is_main:
            print(f"{self.title} · solved from {self.examples.task_rows:,} images · {speed:.0f} images/s", flush=True)
            self.on_epoch(epoch, log)
        return log

    def _restore(self) -> ResumePoint:
        """How far an earlier try came, with its state in place; a damaged checkpoint is reported and not used."""
        try:
            position = self.checkpoint.restore()
        except BadModel as error:
            position = ResumePoint()
            if self.group.is_main:
                print(f"{self.title} starts again: {error}", flush=True)
        if not self.group.agree(len(position.log) * self.updates_per_epoch + position.updates):
            file = self.checkpoint_file
            raise BadData(f"{file}: not seen alike by all processes; put it where all nodes can read it")
        return position

    def _stop(self, position: ResumePoint) -> NoReturn:
        """Save what the next try resumes from and end the process; all processes do so after the same update."""
        if self.group.is_main:
            self.checkpoint.save(position)
            done = f"update {position.updates} of {self.updates_per_epoch} in epoch {len(position.log) + 1}"
            print(f"{self.title} · asked to stop · saved after {done}; the next try resumes there", flush=True)
        self.group.any(flag=False)  # no process leaves before the checkpoint is written
        raise SystemExit(STOPPED)

    def _check_finite(self, epoch: int, updates: list[list[BatchRows]]) -> None:
        """End the training if a loss or gradient was not a number; the images of that update are listed in a file."""
        not_finite = self.watch.found()
        if not_finite is None:
            return
        what, number, rate = not_finite
        file = self.checkpoint_file.with_suffix(".not-finite.txt")
        rows = [row for batch in updates[number] for row in batch.rows]
        if self.group.is_main:
            with atomic_file(file) as temporary:
                ids = self.examples.view.table["image_id"].take(rows).to_pylist()
                temporary.write_text("\n".join(ids) + "\n", encoding="utf-8")
        setting = "train.lr_base" if self.is_base else "train.lr"
        raise NotFinite(
            f"{self.title}: the {what} is not a number in epoch {epoch + 1}, update {number + 1} of "
            f"{self.updates_per_epoch}, at a learning rate of {rate:.3g}; its images are listed in {file}; "
            f"lower {setting} or set train.clip=1"
        )

    def _freeze(self) -> None:
        """Keep from learning: a frozen backbone, and the parameters that the caller or the method names."""
        if self.backbone_is_frozen:
            self.network.backbone.requires_grad_(False)
        frozen = self.method.frozen_parameters(self.network) if self.task > 1 else ()
        for name in (*self.frozen_parameters, *frozen):
            self.network.get_parameter(name).requires_grad_(False)

    def _train_mode(self) -> None:
        """Training mode, but for what is frozen: the backbone, or statistics of batch-norm."""
        self.network.train()
        if self.backbone_is_frozen:
            self.network.backbone.eval()
        chosen = self.config.resolved_batch_norm
        if chosen == "live" or (chosen == "frozen_after_base" and self.is_base):
            return
        kept = self.network.backbone if self.is_base else self.network  # a fresh head has no statistics to keep
        for module in kept.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
