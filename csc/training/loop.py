"""The loop that trains one task, from the first batch to the last checkpoint."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from csc.config.schema import Config
from csc.data.loading import Batch, Batches, evaluation_batches, order, training_batches, workers_for
from csc.data.maps import map_batches
from csc.data.progress import Progress
from csc.data.views import View
from csc.distributed.group import Group, alone, together
from csc.errors import BadConfig, BadData
from csc.methods import method
from csc.methods.base import Method, Replay, Step
from csc.model import save_tensors
from csc.nets.backbone import Backbone
from csc.nets.correlation import statistical_cm
from csc.nets.folding import fold_batch_norms
from csc.nets.network import Network, Outputs
from csc.replay.memory import Memory, joined
from csc.training.checkpoint import Checkpoint, laid_out_like
from csc.training.heap import keep_memory
from csc.training.optimiser import EagerAdam

__all__ = ["EpochLog", "Precision", "Trainer", "confidences", "memory_format", "place", "seed_everything"]

EpochLog = dict[str, float]
CHANNELS_LAST_ON_CPU = ("tf_efficientnet", "efficientnet", "tresnet", "test_resnet")


def seed_everything(seed: int, task: int) -> None:
    """Make what follows depend on the seed and the task alone."""
    torch.manual_seed(seed * 1_000 + task)
    torch.backends.cudnn.deterministic = True


def place(network: Network, config: Config, device: torch.device, *, learns: bool = True) -> Network:
    """Put a network on a device, as is fastest there; one that does not learn is in evaluation and stays so."""
    if device.type == "cpu":
        keep_memory()
    if not learns:
        backbone = network.eval().backbone
        if isinstance(backbone, Backbone):
            fold_batch_norms(backbone.net)
    return network.to(device).to(memory_format=memory_format(config, device, learns=learns))


def memory_format(config: Config, device: torch.device, *, learns: bool = True) -> torch.memory_format:
    """How the network's tensors lie in memory.

    Channels last is faster on GPUs for all networks; on a CPU for forward passes alone, and for the training of those
    that were measured to be (`make bench` (step)).
    """
    wanted = config.train.channels_last
    auto = device.type == "cuda" or not learns or config.backbone.name.startswith(CHANNELS_LAST_ON_CPU)
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
            modern = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            wanted = "off" if device.type == "cpu" else "bf16" if modern else "fp16"
        dtype = torch.float16 if wanted == "fp16" else torch.bfloat16
        return cls(
            torch.autocast(device.type, dtype=dtype, enabled=wanted != "off"),
            torch.amp.GradScaler(device.type, enabled=wanted == "fp16"),
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
        origin: names what the network starts from and its teacher; a checkpoint of another origin is not taken up.
        features: place of cached feature maps that stand in for images; none if empty.
        memory: exemplars of earlier tasks, as this task may see them.
        state: what the method kept of earlier tasks.
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
    origin: str = ""
    frozen_parameters: tuple[str, ...] = ()
    optimizer_state: Path | None = None
    features: str = ""
    memory: Memory | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    group: Group = field(default_factory=alone)
    on_epoch: Callable[[int, EpochLog], None] = lambda epoch, log: None

    def __post_init__(self) -> None:
        if len(self.view) < 2:
            raise BadData(f"{self.title}: one training image; batch-norm needs at least two")
        self.device = self.group.device
        self.method: Method = method(self.config, self.state)
        self.own = len(self.view)  # rows of the task itself; exemplars come after them
        if self.memory is not None:
            self._add(self.memory)
        self.group.prepare(self.network)
        place(self.network, self.config, self.device)
        if self.prior is not None:
            place(self.prior, self.config, self.device, learns=False).requires_grad_(False)
        self._freeze()
        self.optimizer = self._optimizer()
        self.steps = -(-len(self._order(0)) // self.config.train.accumulate)
        self.scheduler = self._scheduler()
        self.precision = Precision.of(self.config, self.device)
        compiled = torch.compile(self.network) if self.config.train.compile else self.network
        self.learner = self.group.learner(cast(nn.Module, compiled))
        # Of plain cached maps the prior model always says the same, so it is asked once.
        fixed = self.prior is not None and self.features and not self.config.input.augment
        self.prior_logits = self.logits_of_prior() if fixed and not self.method.looks_inside else None

    def run(self) -> list[EpochLog]:
        """Train all epochs, taking up an earlier try where its last checkpoint ends; return one log per epoch."""
        self.method.begin(self)
        if any(name == "statistical_cm" for name, _ in self.network.head.named_buffers()):
            self._count_correlations()
        key = self.config.fingerprint(self.view.fingerprint, self.origin, str(self.task), *self.view.classes)
        keeper = Checkpoint(self.checkpoint, key, self.network, self.optimizer, self.scheduler, self.precision.scaler)
        log = keeper.restore()
        if not self.group.agree(len(log)):
            raise BadData(f"{self.checkpoint}: not seen alike by all processes; put it where all nodes can read it")
        progress = Progress(self.title, self.config.train.epochs, self.shown, finished=len(log))
        epochs = range(len(log), self.config.train.epochs)
        batches = self._batches(epochs)
        for epoch in epochs:
            log.append(self._epoch(epoch, batches, progress))
            if self.group.is_main:
                keeper.save(log)
                progress.epoch(epoch, {name: log[-1][name] for name in self._names})
                self.on_epoch(epoch, log[-1])
        self.method.finish(self)
        return log

    @property
    def classes(self) -> tuple[str, ...]:
        """All seen classes, old ones first."""
        return self.view.classes

    @property
    def shown(self) -> int:
        """How many images an epoch shows: the task's, and exemplars unless they are drawn beside them."""
        return self.own if self.config.memory.replay == "batch" else len(self.view)

    def logits_of_prior(self) -> Tensor:
        """What the prior model says of every training image as it is, exemplars included."""
        assert self.prior is not None
        return self._answers(self.prior, range(len(self.view))).to(self.device)

    def logits(self, rows: Sequence[int]) -> Tensor:
        """What the network says now of some training images, as they are."""
        return self._answers(self.network.eval(), rows)

    def pooled_features(self) -> Tensor:
        """The pooled last maps of the task's own images (rows, channels), in evaluation mode."""
        network = self.network.eval()
        return self._answers(lambda images: network.features(images).mean(dim=(2, 3)), range(self.own))

    def plain_batches(self, size: int, most: int) -> Iterator[Batch]:
        """The task's own images without augmentation, drawn at random, at most so many."""
        rows = np.random.default_rng([self._seed, 3]).permutation(self.own)[:most].tolist()
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        for batch in _plain_batches(self.view, parts, self.config, self.features, self.device):
            yield batch.to(self.device)

    def _answers(self, function: Callable[[Tensor], Tensor], rows: Sequence[int]) -> Tensor:
        found = _over(function, self.view, rows, self.config, self.features, self.group)
        return torch.cat([values for _, values in found])

    def _add(self, memory: Memory) -> None:
        """Put the exemplars behind the task's own images, with what is known of their labels and logits."""
        shape = self.own, len(self.view.classes)
        own, nothing = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        own[:, -self.new :] = True
        stored = torch.arange(shape[1]) < torch.from_numpy(memory.stored).unsqueeze(1)
        self.known = torch.cat([own, torch.from_numpy(memory.known_mask())]).to(self.device)
        self.stored_logits = torch.cat([nothing, torch.from_numpy(memory.logits)]).to(self.device)
        self.stored = torch.cat([nothing.bool(), stored]).to(self.device)
        self.view = joined(self.view, memory)

    def _epoch(self, epoch: int, batches: Batches, progress: Progress) -> EpochLog:
        """One pass over the view; the terms are added up on the device and read once, at the end."""
        self._train_mode()
        started, waited = time.monotonic(), batches.waited
        order = self._order(epoch)
        total: dict[str, Tensor] = {}
        for start in range(0, len(order), self.config.train.accumulate):
            parts = order[start : start + self.config.train.accumulate]
            for name, value in self._step(batches, [list(map(len, rows)) for rows in parts]).items():
                total[name] = total[name] + value if name in total else value
            if self.group.is_main:
                progress.advance(epoch, sum(len(rows[0]) for rows in parts))
        self._names = tuple(total)
        means = {name: float(value) / self.steps for name, value in total.items()}
        seconds = time.monotonic() - started
        return {
            **means,
            "loss": sum(means.values()),
            "images_per_second": self.shown / seconds,
            "waiting": (batches.waited - waited) / seconds,
        }

    def save_optimizer(self, path: Path) -> None:
        """Keep Adam's moments by parameter name, for the task after."""
        names = {id(value): name for name, value in self.network.named_parameters()}
        moments = {
            f"{names[id(parameter)]}:{key}": torch.as_tensor(value)
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        save_tensors(moments, path)

    def _step(self, batches: Batches, sizes: list[list[int]]) -> dict[str, Tensor]:
        """One update from one batch, or from several that are accumulated; the terms stay on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        images = sum(size[0] for size in sizes)
        for part, size in enumerate(sizes, start=1):
            batch, share = next(batches).to(self.device), size[0] / images
            with together(self.learner, last=part == len(sizes)):
                terms = self._terms(batch, size, share)
                loss = torch.stack(list(terms.values())).sum() * share
                self.precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for name, value in terms.items():
                total[name] = total.get(name, 0) + value.detach() * share
        if self.config.train.clip:
            self.precision.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.train.clip)
        self.precision.scaler.step(self.optimizer)
        self.precision.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return total

    def _terms(self, batch: Batch, sizes: list[int], share: float) -> dict[str, Tensor]:
        """The loss terms of a batch, of which this process may hold a part.

        Args:
            batch: rows of the task, then those of each draw from the memory.
            sizes: how many of each there are in all processes.
            share: of the update that the batch is.
        """
        parts = [len(self.group.part(range(size))) for size in sizes]
        with self.precision.autocast:
            learner, prior = self._outputs(batch, parts[0])
            inside = self.method.distances(_first(learner, parts[0]), prior) if self.method.looks_inside else {}

        def whole(values: Tensor) -> list[Tensor]:
            """The rows of all processes: those of the task, then those of each draw."""
            pieces = zip(torch.split(values, parts), sizes, strict=True)
            return [self.group.whole(piece, size) for piece, size in pieces]

        logits, targets = whole(learner.logits.float()), whole(batch.targets)
        of_task = {name: self.group.whole(values.float(), sizes[0]) for name, values in inside.items()}
        prior_logits = self.group.whole(prior.logits.float(), sizes[0]) if prior is not None else None
        known: Tensor | None = None
        replays: tuple[Replay, ...] = ()
        if self.memory is not None:
            rows = whole(batch.rows)
            tables = (self.known, self.stored_logits, self.stored)
            draws = zip(logits[1:], targets[1:], rows[1:], strict=True)
            replays = tuple(Replay(z, y, *(table[drawn] for table in tables)) for z, y, drawn in draws)
            known = self.known[rows[0]] if self.config.memory.replay == "concat" else None
        step = Step(logits[0], targets[0], self.new, prior_logits, known, of_task, replays, share)
        return self.method.loss(step) | self.method.penalty(self.network)

    def _outputs(self, batch: Batch, own: int) -> tuple[Outputs, Outputs | None]:
        """What the learner says of all images, and the prior model of the task's; they share a frozen backbone."""
        images, inside = batch.images, self.method.looks_inside
        if self.config.backbone.frozen:
            with torch.no_grad():
                images = self.network.features(images)  # maps, which pass through the networks below as they are
        prior = self._prior_outputs(images[:own], batch.rows[:own])  # first: what it computes with is free again then
        return _as_outputs(self.learner(images, inside)), prior

    def _prior_outputs(self, images: Tensor, rows: Tensor) -> Outputs | None:
        """What the prior model says, if there is one: looked up where it is known, otherwise asked."""
        if self.prior_logits is not None:
            return _as_outputs(self.prior_logits[rows])
        if self.prior is None:
            return None
        inside = self.method.looks_inside
        with torch.no_grad(), torch.inference_mode(not inside):
            answer = _as_outputs(self.prior(images, inside))
        return answer if inside else _as_outputs(answer.logits.clone())  # the graph takes no inference tensor

    def _count_correlations(self) -> None:
        """Fill the head's statistical matrix from the task's labels and the prior model's scores."""
        labels = torch.from_numpy(self.view.targets()[: self.own])
        matrix = self.network.head.get_buffer("statistical_cm")
        if self.config.labels == "seen":  # nothing is hidden: all classes are counted alike
            matrix.copy_(statistical_cm(labels))
            return
        old = len(self.view.classes) - self.new
        prior_logits = self.logits_of_prior()[: self.own].cpu() if self.prior is not None else None
        prior_cm = matrix[:old, :old].cpu().clone() if old else None
        matrix.copy_(statistical_cm(labels[:, old:], prior_logits, prior_cm))

    def _batches(self, epochs: range) -> Batches:
        """This process's part of all batches of the given epochs."""
        plan = [
            (epoch, [[row for rows in step for row in self.group.part(rows)] for step in self._order(epoch)])
            for epoch in epochs
        ]
        if self.features:
            views = self.config.features.views if self.config.input.augment else 0
            return map_batches(self.view, self.features, plan, self._seed, views=views)
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
    def _is_base(self) -> bool:
        """Whether the network starts from the initialisation, not from a model that has learned."""
        return self.task == 1 or not self.method.continues

    @property
    def _seed(self) -> int:
        return self.config.seed * 1_000 + self.task

    def _order(self, epoch: int) -> list[tuple[list[int], ...]]:
        """Of each step of an epoch the task's rows and, if exemplars are drawn beside them, those of each draw."""
        settings, shuffle = self.config.memory, not self.config.release_quirks.no_shuffle
        steps = order(self.shown, self.config.train.batch_size, self._seed, epoch, shuffle=shuffle)
        if self.memory is None or settings.replay == "concat":
            return [(step,) for step in steps]
        random = np.random.default_rng([self._seed, epoch, 2])
        exemplars = len(self.view) - self.own
        size = min(settings.batch_size or self.config.train.batch_size, exemplars)
        # Each draw has row numbers of its own, a multiple of the view's length away, and so its own augmentation.
        draws = iter(range(len(self.view), len(self.view) * (1 + len(steps) * self.method.draws), len(self.view)))
        return [
            (
                step,
                *(
                    (random.choice(exemplars, size, replace=False) + self.own + next(draws)).tolist()
                    for _ in range(self.method.draws)
                ),
            )
            for step in steps
        ]

    def _freeze(self) -> None:
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
        if self.config.release_quirks.freeze_bn_after_base and not self._is_base:
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    def _optimizer(self) -> EagerAdam:
        """Fresh Adam; vectors and biases without weight decay; the backbone with its own share of the rate."""
        settings = self.config.train
        rate = settings.lr_base if self._is_base else settings.lr
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

    Every process of a group gets all of them, each image scored by one. The network is placed for it, its batch-norms
    folded: do not train or save it afterwards.
    """
    group = group or alone()
    place(network, config, group.device, learns=False)
    for rows, logits in _over(network, view, range(len(view)), config, features, group):
        yield rows, logits.sigmoid()


def _over(
    function: Callable[[Tensor], Tensor],
    view: View,
    rows: Sequence[int],
    config: Config,
    features: str,
    group: Group,
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a function says of some images of a view, batch by batch; every process of the group gets all of it."""
    size = 2 * config.train.batch_size * group.world
    whole = [rows[start : start + size] for start in range(0, len(rows), size)]
    parts = [group.part(rows) for rows in whole]
    for rows, batch in zip(whole, _plain_batches(view, parts, config, features, group.device), strict=True):
        with torch.inference_mode():
            values = function(batch.to(group.device).images).float()
            yield torch.tensor(rows), group.whole(values, len(rows)).cpu()


def _plain_batches(
    view: View, parts: Sequence[Sequence[int]], config: Config, features: str, device: torch.device
) -> Batches:
    """Batches of the given rows, without augmentation."""
    if features:
        return map_batches(view, features, [(0, parts)], 0, views=0)
    workers = workers_for(config.train.workers, device)
    return evaluation_batches(view, parts, size=config.input.size, decode=config.input.decode, workers=workers)


def _as_outputs(answer: Tensor | Outputs) -> Outputs:
    """Logits alone as outputs of which nobody asks for more."""
    return answer if isinstance(answer, Outputs) else Outputs(answer, answer, (), None)


def _first(outputs: Outputs, rows: int) -> Outputs:
    """The outputs of the first rows."""
    logits, representation, stages, pull = outputs
    first = tuple(stage[:rows] for stage in stages)
    return Outputs(logits[:rows], representation[:rows], first, None if pull is None else pull[:rows])
