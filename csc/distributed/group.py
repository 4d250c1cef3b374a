r"""Several processes that train or score as one: data-parallel, with the loss curve of a single process.

A batch of `order()` is dealt out row by row: rank r of w takes its rows r, r + w, r + 2w, … and may get none of a batch
smaller than w. Three things make w processes compute what one would:

Loss. A mean over a rank's own rows, averaged over ranks, is the mean over the batch only if all ranks have equally
many rows, and a loss need not be a mean. So every rank computes the loss L on the logits z of the whole batch
(`Group.whole`). The rows of other ranks come without gradient, so rank r's backward pass gives

    w · ∂L/∂z_r · ∂z_r/∂θ        (the gradient of the own rows is multiplied by w, their value is not)

and the average over ranks that DistributedDataParallel takes is Σ_r ∂L/∂z_r · ∂z_r/∂θ = ∂L/∂θ, whatever L is. A term
that depends on parameters alone is computed alike on all ranks, without that factor, and averages to itself.

Batch-norm. Mean and variance are those of the whole batch (`Group.prepare`): torch's SyncBatchNorm on GPUs, the same in
plain operations on the CPU. Names in the state dict stay as they were.

Order. `whole` puts the rows back in the order of the batch, so sums run as in one process.

`run` starts processes on this machine. torchrun or the Kubeflow Trainer may as well have started them: what counts is
RANK and WORLD_SIZE in the environment. Each process executes `python -m csc.distributed.group MODULE:FUNCTION FILE`
and ends when the one that started it does.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from csc import errors
from csc.errors import BadConfig, CscError
from csc.storage import read_json, write_json

__all__ = ["Group", "alone", "group", "processes_for", "raise_error", "run", "started", "target_of", "together"]

PATIENCE = timedelta(minutes=30)  # how long a rank waits for the others, who may be fetching data
GRACE_SECONDS = 20
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
STOPS = (signal.SIGTERM, signal.SIGHUP)  # what ends the launcher and its ranks; SIGINT does so as KeyboardInterrupt
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
T = TypeVar("T")


def started() -> bool:
    """Whether this process is one of several that the environment describes."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def processes_for(wanted: int | Literal["auto"], *, exactly: bool = True) -> int:
    """How many processes are to share the work that this one was asked to do.

    `auto` is one for each visible GPU, and one on the CPU. A process that is itself one of several starts no more.

    Args:
        wanted: from the settings.
        exactly: refuse more processes than there are GPUs; otherwise there are then as many as GPUs.
    """
    gpus = torch.cuda.device_count()
    if started():
        return 1
    if wanted == "auto":
        return max(gpus, 1)
    if gpus and wanted > gpus:
        if not exactly:
            return gpus
        raise BadConfig(f"train.processes={wanted}: each process needs a GPU of its own, this machine shows {gpus}")
    return wanted


@dataclass(frozen=True)
class Group:
    """The processes that do one thing together, as one of them sees it; of a process alone, a group of one."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that tracks, prints and writes files."""
        return self.rank == 0

    def part(self, rows: Sequence[T]) -> list[T]:
        """The rows that fall to this rank: every `world`-th from `rank` on."""
        return list(rows[self.rank :: self.world])

    def whole(self, part: Tensor, total: int) -> Tensor:
        """The `total` rows that the parts of all ranks come from, in their order; the same on every rank.

        The own rows keep their gradient, multiplied by `world`; the text of the module says why.
        """
        if self.world == 1:
            return part
        longest = -(-total // self.world)  # of all parts; the others are one row short
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part.detach()
        gathered = part.new_empty(self.world * longest, *part.shape[1:])
        dist.all_gather_into_tensor(gathered, padded)
        rows = gathered.view(self.world, *padded.shape).transpose(0, 1).flatten(0, 1)[:total]
        return cast(Tensor, _OwnRows.apply(rows, part, self.rank, self.world))

    def agree(self, number: int) -> bool:
        """Whether all ranks have the same number; also a point where they wait for each other."""
        if self.world == 1:
            return True
        bounds = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return int(bounds[0]) == -int(bounds[1])

    def prepare(self, network: nn.Module) -> None:
        """Let the batch-norm layers inside `network` see the whole batch; parameters and their names stay."""
        if self.world == 1:
            return
        if self.device.type == "cpu":
            _normalise_together(network)
        else:
            from timm.layers import convert_sync_batchnorm

            convert_sync_batchnorm(network)
            for layer in network.modules():
                if isinstance(layer, nn.SyncBatchNorm):
                    layer.register_forward_pre_hook(_float_if_empty)

    def learner(self, module: nn.Module) -> nn.Module:
        """The module with its gradients averaged over ranks: what training calls in place of it.

        Call it when parameters are frozen or not for good, and laid out in memory as they stay: gradients live in the
        buckets that are exchanged, with the strides that their parameters have now.
        """
        if self.world == 1:
            return module
        return DistributedDataParallel(
            module,
            device_ids=None if self.device.type == "cpu" else [self.device],
            forward_sync_buffers=False,  # they stay equal by themselves
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # some backbones end in a norm that only their own classifier uses
        )


def alone() -> Group:
    """A process that works by itself, on the GPU if there is one."""
    return Group(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@contextlib.contextmanager
def group() -> Iterator[Group]:
    """Join the processes that the environment describes for as long as the block lasts; or be alone."""
    gpus = torch.cuda.device_count()
    if not started() or os.environ["WORLD_SIZE"] == "1":
        yield alone()
        return
    local, peers = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and local >= gpus:
        raise BadConfig(f"train.processes={peers}: each process needs a GPU of its own, this machine shows {gpus}")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    torch.set_num_threads(max(torch.get_num_threads() // peers, 1))
    if gpus:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    yield Group(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def together(learner: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Around forward and backward of one part of an accumulated batch: only the last part exchanges gradients."""
    if last or not isinstance(learner, DistributedDataParallel):
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], learner.no_sync())


def _float_if_empty(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    """Let a rank without rows send the statistics of nothing as float32, as other ranks do whatever they compute in."""
    return (inputs[0].float(),) if inputs[0].numel() == 0 else None


class _OwnRows(Function):
    """The whole batch as it is; backward, the own rows of it with their gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: Tensor, rank: int, world: int) -> Tensor:
        ctx.rank, ctx.world = rank, world
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, gradient[ctx.rank :: ctx.world] * ctx.world, None, None


class _Sum(Function):
    """The sum over ranks; of the gradients too, as what one rank sums up serves all of them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)


class _GlobalBatchNorm(_BatchNorm):
    """Batch-norm over the batch of all ranks, as torch.nn.SyncBatchNorm, which exists on GPUs only.

    Like timm's layers it may end in dropout and activation.
    """

    def __init__(self, local: _BatchNorm) -> None:
        super().__init__(local.num_features, local.eps, local.momentum, local.affine, local.track_running_stats)
        for name, value in [*local.named_parameters(recurse=False), *local.named_buffers(recurse=False)]:
            setattr(self, name, value)
        for name, child in local.named_children():
            self.add_module(name, child)
        self.train(local.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of all ranks; in evaluation with the running ones."""
        if self.training:
            y = self._normalise(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        else:
            y = batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        for child in self.children():  # of timm's layers: drop, act
            y = child(y)
        return y

    def _normalise(self, x: Tensor) -> Tensor:
        axes, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        count = cast(Tensor, _Sum.apply(x.new_tensor(x.numel() / self.num_features)))
        mean = cast(Tensor, _Sum.apply(x.sum(axes))) / count
        centred = x - mean.view(shape)
        variance = cast(Tensor, _Sum.apply(centred.square().sum(axes))) / count
        self._follow(mean.detach(), variance.detach() * count / (count - 1))
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow those of a batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def _normalise_together(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, _GlobalBatchNorm(child))
        else:
            _normalise_together(child)


def run(function: Callable[..., T], arguments: Mapping[str, Any], processes: int) -> T:
    """Run a function of a module in several processes of this machine and return what it returns on rank 0.

    Output of the processes goes where ours goes. If one ends with a CscError, so does this; the others are stopped. All
    of them end with this process, however it ends: the next try must not meet them.

    Args:
        function: found again by its name, so it must be at the top of a module.
        arguments: as JSON can hold them; so must be the result.
        processes: how many; they meet at a free port of 127.0.0.1.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="csc-processes-") as folder, _torchrun_quiet():
        file = Path(folder) / "arguments.json"
        write_json(file, dict(arguments))
        place = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle=",".join(number.name for number in _heard()),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(place, sys.executable)("-m", __name__, target_of(function), str(file), str(os.getpid()))
        except ChildFailedError as failed:
            raise_error(file)
            rank, failure = failed.get_first_failure()
            end = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
            raise RuntimeError(
                f"{function.__name__}: process {rank + 1} of {processes} ended {end}, see above"
            ) from None
        except SignalException as received:
            raise SystemExit(128 + received.sigval) from None
        return cast(T, read_json(file.with_name("result.json")))


@contextlib.contextmanager
def _torchrun_quiet() -> Iterator[None]:
    """Keep to ourselves what torch warns of and its launcher says of a failure; give back the signals it listens to."""
    logger = logging.getLogger("torch.distributed.elastic")
    nobody = logging.NullHandler()
    before, handlers = logger.propagate, {number: signal.getsignal(number) for number in STOPS}
    logger.addHandler(nobody)
    logger.propagate = False
    level = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        logger.removeHandler(nobody)
        logger.propagate = before
        if level is None:
            del os.environ[LOG_LEVEL]
        with contextlib.suppress(ValueError):  # not the main thread, where no handler was set either
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _heard() -> list[signal.Signals]:
    """The signals that stop us; not those that whoever started us has us ignore, as nohup does."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def target_of(function: Callable[..., Any]) -> str:
    """The name by which another process finds a function."""
    return f"{function.__module__}:{function.__qualname__}"


def raise_error(file: Path) -> None:
    """Raise the CscError, if there was one, that a process with these arguments ended in."""
    path = file.with_name("error.json")
    if path.is_file():
        content = read_json(path)
        kind = getattr(errors, content["kind"], CscError)
        raise kind(content["message"])


def _end_with_parent(launcher: int | None) -> None:
    """Have the kernel end this process when its parent dies, even if that is killed; only Linux can.

    Ranks are sessions of their own, so that nothing else would tell them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is not None and os.getppid() != launcher:  # it died while torch was imported here
        sys.exit(1)


def main(target: str, file: Path, launcher: int | None = None) -> int:
    """Be one of the processes: call the function with the arguments in the file; result or error go beside it.

    Args:
        target: from `target_of`.
        file: the arguments, as JSON.
        launcher: process that `run` was called in; of torchrun, which may have any number and be process 1, not known.
    """
    _end_with_parent(launcher)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        result = function(**read_json(file))
    except CscError as error:
        write_json(file.with_name("error.json"), {"kind": type(error).__name__, "message": str(error)})
        return 2
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # another process is gone; that one has the news
            time.sleep(GRACE_SECONDS)  # and here the launcher ends us
        raise
    if os.environ.get("RANK", "0") == "0":
        write_json(file.with_name("result.json"), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
