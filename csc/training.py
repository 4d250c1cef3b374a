"""The loop that trains one task, from the first batch to the last checkpoint."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from csc.checkpoint import Checkpoint, laid_out_like
from csc.config import Config
from csc.data.loading import Batch, evaluation_batches, order, training_batches, workers_for
from csc.data.partial import View
from csc.errors import BadConfig, BadData
from csc.methods import method
from csc.methods.base import Method, Step
from csc.nets.correlation import statistical_cm
from csc.nets.network import Network
from csc.progress import Progress

__all__ = ["EpochLog", "Trainer", "confidences", "device_of_choice", "seed_everything"]

EpochLog = dict[str, float]


def device_of_choice() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(seed: int, task: int) -> None:
    """Make what follows depend on the seed and the task alone."""
    torch.manual_seed(seed * 1_000 + task)
    torch.backends.cudnn.deterministic = True


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
    on_epoch: Callable[[int, EpochLog], None] = lambda epoch, log: None

    def __post_init__(self) -> None:
        if len(self.view) < 2:
            raise BadData(f"{self.title}: one training image; batch-norm needs at least two")
        self.device = device_of_choice()
        self.method: Method = method(self.config)
        self.network.to(self.device)
        if self.prior is not None:
            self.prior.to(self.device).eval().requires_grad_(False)
        if self._channels_last():
            self.network.to(memory_format=torch.channels_last)
        self._freeze()
        self.optimizer = self._optimizer()
        self.steps = len(self._order(0))
        self.scheduler = self._scheduler()
        half = self.device.type == "cuda" and self.config.train.amp == "auto"
        self.dtype = torch.bfloat16 if half and torch.cuda.is_bf16_supported() else torch.float16
        self.autocast = torch.autocast(self.device.type, dtype=self.dtype, enabled=half)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half and self.dtype == torch.float16)

    def run(self) -> list[EpochLog]:
        """Train all epochs, taking up an earlier try where its last checkpoint ends; return one log per epoch."""
        if self.config.head == "ci_gcn" and self.config.cigcn.correlation != "G->S":
            self._count_correlations()
        key = self.config.fingerprint(self.view.fingerprint, str(self.task), *self.view.classes)
        keeper = Checkpoint(self.checkpoint, key, self.network, self.optimizer, self.scheduler, self.scaler)
        log = keeper.restore()
        progress = Progress(self.title, self.config.train.epochs, len(self.view), finished=len(log))
        epochs = range(len(log), self.config.train.epochs)
        batches = self._batches(epochs)
        for epoch in epochs:
            self._train_mode()
            started = time.monotonic()
            total: dict[str, Tensor] = {}
            for _ in range(self.steps):
                batch = next(batches).to(self.device)
                for name, value in self._step(batch).items():
                    total[name] = total[name] + value if name in total else value
                progress.advance(epoch, len(batch.rows))
            means = {name: float(value) / self.steps for name, value in total.items()}
            seconds = time.monotonic() - started
            log.append({**means, "loss": sum(means.values()), "images_per_second": len(self.view) / seconds})
            keeper.save(log)
            progress.epoch(epoch, means)
            self.on_epoch(epoch, log[-1])
        return log

    def save_optimizer(self, path: Path) -> None:
        """Keep Adam's moments by parameter name, for the task after."""
        names = {id(value): name for name, value in self.network.named_parameters()}
        moments = {
            f"{names[id(parameter)]}:{key}": torch.as_tensor(value).detach().cpu().contiguous()
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        save_file(moments, path)

    def _step(self, batch: Batch) -> dict[str, Tensor]:
        """Forward, backward and update on one batch; the terms stay on the device."""
        with self.autocast:
            logits, prior_logits = self._logits(batch.images)
        terms = self.method.loss(Step(logits, batch.targets, self.new, prior_logits))
        loss = torch.stack(list(terms.values())).sum()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return {name: value.detach() for name, value in terms.items()}

    def _logits(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the learner and, if there is one, of the prior model; a frozen backbone is shared by the two."""
        if not self.config.backbone.frozen:
            prior_logits = None
            if self.prior is not None:
                with torch.inference_mode():
                    prior_logits = self.prior(images).float()
                prior_logits = prior_logits.clone()  # an inference tensor may not enter the graph
            return self.network(images).float(), prior_logits
        with torch.no_grad():
            maps = self.network.features(images)
            prior_logits = self.prior.head(maps).float() if self.prior is not None else None
        return self.network.head(maps).float(), prior_logits

    def _count_correlations(self) -> None:
        """Fill the head's statistical matrix from the task's labels and the prior model's scores."""
        labels = torch.from_numpy(self.view.targets())
        matrix = self.network.head.get_buffer("statistical_cm")
        if self.config.labels == "seen":  # nothing is hidden: all classes are counted alike
            matrix.copy_(statistical_cm(labels))
            return
        old = len(self.view.classes) - self.new
        prior_logits = None
        if self.prior is not None:
            prior_logits = torch.cat(
                [logits for _, logits in _logits_of(self.prior, self.view, self.config, self.device)]
            )
        prior_cm = matrix[:old, :old].cpu().clone() if old else None
        matrix.copy_(statistical_cm(labels[:, old:], prior_logits, prior_cm))

    def _batches(self, epochs: range) -> Iterator[Batch]:
        return training_batches(
            self.view,
            size=self.config.input.size,
            batch_size=self.config.train.batch_size,
            seed=self._seed,
            epochs=epochs,
            augment=self.config.input.augment,
            shuffle=not self.config.release_quirks.no_shuffle,
            workers=workers_for(self.config.train.workers, self.device),
        )

    @property
    def _seed(self) -> int:
        return self.config.seed * 1_000 + self.task

    def _order(self, epoch: int) -> list[list[int]]:
        return order(len(self.view), self.config.train.batch_size, self._seed, epoch)

    def _channels_last(self) -> bool:
        wanted = self.config.train.channels_last
        return wanted == "on" or (wanted == "auto" and self.device.type == "cuda")

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

    def _optimizer(self) -> Adam:
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
        optimizer = Adam(
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

    def _inherit(self, optimizer: Adam, path: Path) -> None:
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


def confidences(network: Network, view: View, config: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Sigmoid confidences of a network on a view, batch by batch: (rows, float32 confidences), in full precision."""
    device = device_of_choice()
    network.to(device).eval()
    for rows, logits in _logits_of(network, view, config, device):
        yield rows, logits.sigmoid()


def _logits_of(network: Network, view: View, config: Config, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    batches = evaluation_batches(
        view,
        size=config.input.size,
        batch_size=2 * config.train.batch_size,
        workers=workers_for(config.train.workers, device),
    )
    for batch in batches:
        with torch.inference_mode():
            yield batch.rows, network(batch.to(device).images).float().cpu()
