"""The loop that trains one task, from the first batch to the last checkpoint."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from csc.adam import EagerAdam
from csc.checkpoint import Checkpoint, laid_out_like
from csc.config import Config
from csc.data.loading import Batch, Batches, evaluation_batches, order, training_batches, workers_for
from csc.data.maps import map_batches
from csc.data.partial import View
from csc.distributed import Group, alone, together
from csc.errors import BadConfig, BadData
from csc.methods import method
from csc.methods.base import Method, Step
from csc.nets.correlation import statistical_cm
from csc.nets.network import Network
from csc.progress import Progress

__all__ = ["EpochLog", "Precision", "Trainer", "confidences", "memory_format", "place", "seed_everything"]

EpochLog = dict[str, float]
CHANNELS_LAST_ON_CPU = ("tf_efficientnet", "efficientnet", "test_resnet")


def seed_everything(seed: int, task: int) -> None:
    """Make what follows depend on the seed and the task alone."""
    torch.manual_seed(seed * 1_000 + task)
    torch.backends.cudnn.deterministic = True


def place(network: Network, config: Config, device: torch.device) -> Network:
    """Put a network on a device, its tensors laid out as they are fastest there."""
    return network.to(device).to(memory_format=memory_format(config, device))


def memory_format(config: Config, device: torch.device) -> torch.memory_format:
    """How the network's tensors lie in memory.

    Channels last is faster on GPUs for all networks; on a CPU for those that were measured to be (`csc bench step`).
    """
    wanted = config.train.channels_last
    auto = device.type == "cuda" or config.backbone.name.startswith(CHANNELS_LAST_ON_CPU)
    return torch.channels_last if wanted == "on" or (wanted == "auto" and auto) else torch.contiguous_format


@dataclass(frozen=True)
class Precision:
    """In which numbers forward passes compute, and the scaling that float16 gradients need."""

    autocast: torch.autocast
    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "Precision":
        """The precision that the settings name; by itself a GPU takes bfloat16, or float16 if it is too old."""
        wanted = config.train.amp
        if wanted == "auto":
            modern = device.type == "cuda" and torch.cuda.is_bf16_supported()
            wanted = "off" if device.type == "cpu" else "bf16" if modern else "fp16"
        dtype = torch.float16 if wanted == "fp16" else torch.bfloat16
        scaled = wanted == "fp16" and device.type == "cuda"  # a CPU has no scaled optimiser step
        return cls(
            torch.autocast(device.type, dtype=dtype, enabled=wanted != "off"),
            torch.amp.GradScaler(device.type, enabled=scaled),
        )


@dataclass
class Trainer:
    """One task: a network that learns, a view to learn from, and the model before as teacher.

    Attributes:
        network: already grown to the classes of the view.
        prior: model of the task before, if the method asks for it.
        frozen_parameters: names that must not learn (grown layers under the release's quirk).
        new: how many of the view's classes are new.
        title: how the progress line names the task.
        checkpoint: file that keeps the state between epochs.
        features: place of cached feature maps that stand in for images; none if empty.
        group: the processes that train together; alone by default.
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
    frozen_parameters: tuple[str, ...] = ()
    optimizer_state: Path | None = None
    features: str = ""
    group: Group = field(default_factory=alone)
    on_epoch: Callable[[int, EpochLog], None] = lambda epoch, log: None

    def __post_init__(self) -> None:
        if len(self.view) < 2:
            raise BadData(f"{self.title}: one training image; batch-norm needs at least two")
        self.device = self.group.device
        self.method: Method = method(self.config)
        self.group.prepare(self.network)
        place(self.network, self.config, self.device)
        if self.prior is not None:
            place(self.prior, self.config, self.device).eval().requires_grad_(False)
        self._freeze()
        self.optimizer = self._optimizer()
        self.steps = -(-len(self._order(0)) // self.config.train.accumulate)
        self.scheduler = self._scheduler()
        self.precision = Precision.of(self.config, self.device)
        compiled = torch.compile(self.network) if self.config.train.compile else self.network
        self.learner = self.group.learner(cast(nn.Module, compiled))
        # Of plain cached maps the prior model always says the same, so it is asked once.
        fixed = self.prior is not None and self.features and not self.config.input.augment
        self.prior_logits = self._prior_logits() if fixed else None

    def run(self) -> list[EpochLog]:
        """Train all epochs, taking up an earlier try where its last checkpoint ends; return one log per epoch."""
        if self.config.head == "ci_gcn" and self.config.cigcn.correlation != "G->S":
            self._count_correlations()
        key = self.config.fingerprint(self.view.fingerprint, str(self.task), *self.view.classes)
        keeper = Checkpoint(self.checkpoint, key, self.network, self.optimizer, self.scheduler, self.precision.scaler)
        log = keeper.restore()
        if not self.group.agree(len(log)):
            raise BadData(f"{self.checkpoint}: not seen alike by all processes; put it where all nodes can read it")
        progress = Progress(self.title, self.config.train.epochs, len(self.view), finished=len(log))
        epochs = range(len(log), self.config.train.epochs)
        batches = self._batches(epochs)
        for epoch in epochs:
            log.append(self._epoch(epoch, batches, progress))
            if self.group.is_main:
                keeper.save(log)
                progress.epoch(epoch, {name: log[-1][name] for name in self._names})
                self.on_epoch(epoch, log[-1])
        return log

    def _epoch(self, epoch: int, batches: Batches, progress: Progress) -> EpochLog:
        """One pass over the view; the terms are added up on the device and read once, at the end."""
        self._train_mode()
        started, waited = time.monotonic(), batches.waited
        order = self._order(epoch)
        total: dict[str, Tensor] = {}
        for start in range(0, len(order), self.config.train.accumulate):
            parts = order[start : start + self.config.train.accumulate]
            for name, value in self._step(batches, [len(rows) for rows in parts]).items():
                total[name] = total[name] + value if name in total else value
            if self.group.is_main:
                progress.advance(epoch, sum(map(len, parts)))
        self._names = tuple(total)
        means = {name: float(value) / self.steps for name, value in total.items()}
        seconds = time.monotonic() - started
        return {
            **means,
            "loss": sum(means.values()),
            "images_per_second": len(self.view) / seconds,
            "waiting": (batches.waited - waited) / seconds,
        }

    def save_optimizer(self, path: Path) -> None:
        """Keep Adam's moments by parameter name, for the task after."""
        names = {id(value): name for name, value in self.network.named_parameters()}
        moments = {
            f"{names[id(parameter)]}:{key}": torch.as_tensor(value).detach().cpu().contiguous()
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        save_file(moments, path)

    def _step(self, batches: Batches, sizes: list[int]) -> dict[str, Tensor]:
        """One update from one batch, or from several that are accumulated; the terms stay on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        for part, size in enumerate(sizes, start=1):
            batch = next(batches).to(self.device)
            with together(self.learner, last=part == len(sizes)):
                terms = self._terms(batch, size)
                loss = torch.stack(list(terms.values())).sum() / len(sizes)
                self.precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for name, value in terms.items():
                total[name] = total.get(name, 0) + value.detach() / len(sizes)
        self.precision.scaler.step(self.optimizer)
        self.precision.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def _terms(self, batch: Batch, size: int) -> dict[str, Tensor]:
        """The loss terms of a batch of `size` rows, of which this process may hold a part."""
        with self.precision.autocast:
            logits, prior_logits = self._logits(batch)
        whole = self.group.whole
        step = Step(
            whole(logits, size),
            whole(batch.targets, size),
            self.new,
            whole(prior_logits, size) if prior_logits is not None else None,
        )
        return self.method.loss(step)

    def _logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits of the learner and, if there is one, of the prior model; a frozen backbone is shared by the two."""
        images = batch.images
        if self.config.backbone.frozen:
            with torch.no_grad():
                images = self.network.features(images)  # maps, which pass through the networks below as they are
        if self.prior_logits is not None:
            return self.learner(images).float(), self.prior_logits[batch.rows]
        if self.prior is None:
            return self.learner(images).float(), None
        with torch.inference_mode():
            prior_logits = self.prior(images).float()
        return self.learner(images).float(), prior_logits.clone()  # an inference tensor may not enter the graph

    def _count_correlations(self) -> None:
        """Fill the head's statistical matrix from the task's labels and the prior model's scores."""
        labels = torch.from_numpy(self.view.targets())
        matrix = self.network.head.get_buffer("statistical_cm")
        if self.config.labels == "seen":  # nothing is hidden: all classes are counted alike
            matrix.copy_(statistical_cm(labels))
            return
        old = len(self.view.classes) - self.new
        prior_logits = self._prior_logits().cpu() if self.prior is not None else None
        prior_cm = matrix[:old, :old].cpu().clone() if old else None
        matrix.copy_(statistical_cm(labels[:, old:], prior_logits, prior_cm))

    def _prior_logits(self) -> Tensor:
        """What the prior model says of every image of the view, as it is."""
        assert self.prior is not None
        batches = _logits_of(self.prior, self.view, self.config, self.features, self.group)
        return torch.cat([logits for _, logits in batches]).to(self.device)

    def _batches(self, epochs: range) -> Batches:
        """This process's part of all batches of the given epochs."""
        plan = [(epoch, [self.group.part(rows) for rows in self._order(epoch)]) for epoch in epochs]
        if self.features:
            return map_batches(self.view, self.features, plan, self._seed, augmented=self.config.input.augment)
        return training_batches(
            self.view,
            plan,
            seed=self._seed,
            size=self.config.input.size,
            decode=self.config.input.decode,
            augment=self.config.input.augment,
            workers=workers_for(self.config.train.workers, self.device),
        )

    @property
    def _seed(self) -> int:
        return self.config.seed * 1_000 + self.task

    def _order(self, epoch: int) -> list[list[int]]:
        shuffle = not self.config.release_quirks.no_shuffle
        return order(len(self.view), self.config.train.batch_size, self._seed, epoch, shuffle=shuffle)

    def _freeze(self) -> None:
        if self.config.backbone.frozen:
            self.network.backbone.requires_grad_(False)
        for name in self.frozen_parameters:
            self.network.get_parameter(name).requires_grad_(False)

    def _train_mode(self) -> None:
        """Training mode, but for what is frozen: a frozen backbone, and batch-norm under the release's quirk."""
        self.network.train()
        if self.config.backbone.frozen:
            self.network.backbone.eval()
        if self.config.release_quirks.freeze_bn_after_base and self.task > 1:
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _optimizer(self) -> EagerAdam:
        """Fresh Adam; vectors and biases without weight decay; the backbone with its own share of the rate."""
        settings = self.config.train
        rate = settings.lr_base if self.task == 1 else settings.lr
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad:
                decays = parameter.ndim > 1 and not name.endswith(".bias")
                groups.setdefault((name.startswith("backbone."), decays), []).append(parameter)
        if not groups:
            raise BadConfig("nothing to train: backbone.frozen and release_quirks.freeze_grown_layers leave nothing")
        optimizer = EagerAdam(
            [
                {
                    "params": parameters,
                    "lr": rate * (settings.backbone_lr_scale if of_backbone else 1.0),
                    "weight_decay": settings.weight_decay if decays else 0.0,
                }
                for (of_backbone, decays), parameters in groups.items()
            ],
            fused=True,
        )
        if self.optimizer_state is not None:
            self._inherit(optimizer, self.optimizer_state)
        return optimizer

    def _inherit(self, optimizer: EagerAdam, path: Path) -> None:
        """Take over the moments of all parameters that kept their shape."""
        moments = load_file(path)
        for name, parameter in self.network.named_parameters():
            state = {
                key: moments[f"{name}:{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}:{key}" in moments
            }
            if parameter.requires_grad and state and state["exp_avg"].shape == parameter.shape:
                optimizer.state[parameter] = {key: laid_out_like(parameter, value) for key, value in state.items()}

    def _scheduler(self) -> LRScheduler | None:
        if self.config.train.schedule == "constant":
            return None
        rates = [group["lr"] for group in self.optimizer.param_groups]
        total = max(self.config.train.epochs * self.steps, 2)
        warm_up = self.config.train.pct_start
        if any(math.isclose(warm_up * total, end) for end in (1, total)):
            warm_up -= 1e-6  # a phase of no length would divide by zero
        return OneCycleLR(self.optimizer, max_lr=rates, total_steps=total, pct_start=warm_up)


def confidences(
    network: Network, view: View, config: Config, features: str = "", group: Group | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sigmoid confidences of a network on a view, batch by batch: (rows, float32 confidences), in full precision.

    Every process of a group gets all of them, each image scored by one.
    """
    group = group or alone()
    place(network, config, group.device).eval()
    for rows, logits in _logits_of(network, view, config, features, group):
        yield rows, logits.sigmoid()


def _logits_of(
    network: Network, view: View, config: Config, features: str, group: Group
) -> Iterator[tuple[Tensor, Tensor]]:
    size = 2 * config.train.batch_size * group.world
    whole = [range(start, min(start + size, len(view))) for start in range(0, len(view), size)]
    parts = [group.part(rows) for rows in whole]
    if features:
        batches = map_batches(view, features, [(0, parts)], 0, augmented=False)
    else:
        batches = evaluation_batches(
            view,
            parts,
            size=config.input.size,
            decode=config.input.decode,
            workers=workers_for(config.train.workers, group.device),
        )
    for rows, batch in zip(whole, batches, strict=True):
        with torch.inference_mode():
            logits = network(batch.to(group.device).images).float()
            yield torch.tensor(rows), group.whole(logits, len(rows)).cpu()
