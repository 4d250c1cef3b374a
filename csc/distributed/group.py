"""Several processes that train or score as one: data-parallel, with the loss curve of a single process.

A batch is sharded row by row: rank r of w takes its rows r, r + w, r + 2w, … and may get none of a batch smaller than
w. Three things make w processes compute what one would:

Loss. A mean over a rank's own rows, averaged over ranks, is the mean over the batch only if all ranks have equally
many rows, and a loss need not be a mean. So every rank computes the loss L on the logits z of the whole batch
(`Group.gather`). The rows of other ranks come without gradient, so rank r's backward pass gives

    w · ∂L/∂z_r · ∂z_r/∂θ        (the gradient of the own rows is multiplied by w, their value is not)

and the average over ranks that DistributedDataParallel takes is Σ_r ∂L/∂z_r · ∂z_r/∂θ = ∂L/∂θ, whatever L is. A term
that depends on parameters alone is computed alike on all ranks, without that factor, and averages to itself.

Batch-norm. Mean and variance are those of the whole batch (`Group.sync_batch_norms`): torch's SyncBatchNorm on GPUs,
the same in plain operations on the CPU. Names in the state dict stay as they were.

Order. `gather` puts the rows back in the order of the batch, so sums run as in one process.

Who started the processes does not matter (`csc.distributed.launch`, torchrun, the Kubeflow Trainer): what counts is
RANK and WORLD_SIZE in the environment.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from csc.distributed.batch_norm import sync_batch_norms
from csc.errors import BadConfig

__all__ = ["Group", "join_group", "no_sync", "one_of_several", "single_process"]

TIMEOUT = timedelta(minutes=30)  # how long a rank waits for the others, who may be fetching data
T = TypeVar("T")


def one_of_several() -> bool:
    """Whether this process is one of several that the environment describes."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Group:
    """The processes that do one thing together, as one of them sees it; of a process alone, a group of one."""

    rank: int
    world: int
    device: torch.device
    hosts: dist.ProcessGroup | None = None  # the same processes, connected without their GPUs

    @property
    def is_main(self) -> bool:
        """Whether this is the process that tracks, prints and writes files."""
        return self.rank == 0

    def shard(self, rows: Sequence[T]) -> list[T]:
        """The rows that fall to this rank: every `world`-th from `rank` on."""
        return list(rows[self.rank :: self.world])

    def gather(self, shard: Tensor, total: int) -> Tensor:
        """The `total` rows whose shards all ranks have, in their order; the same on every rank.

        The own rows keep their gradient, multiplied by `world`; the text of the module says why.
        """
        if self.world == 1:
            return shard
        longest = -(-total // self.world)  # of all shards; the others are one row short
        padded = shard.new_zeros(longest, *shard.shape[1:])
        padded[: len(shard)] = shard.detach()
        gathered = shard.new_empty(self.world * longest, *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, padded)
        rows = gathered.view(self.world, *padded.shape).transpose(0, 1).flatten(0, 1)[:total]
        return cast(Tensor, _OwnRows.apply(rows, shard, self.rank, self.world))

    def agree(self, number: int) -> bool:
        """Whether all ranks have the same number; also a point where they wait for each other."""
        if self.world == 1:
            return True
        bounds = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return int(bounds[0]) == -int(bounds[1])

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any rank; hosts wait for each other, but none for its GPU."""
        if self.world == 1:
            return flag
        flags = torch.tensor(flag, dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.hosts)
        return bool(flags)

    def sync_batch_norms(self, network: nn.Module) -> None:
        """Let the batch-norm layers inside a network see the whole batch."""
        if self.world > 1:
            sync_batch_norms(network, self.device)

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


def single_process() -> Group:
    """A process that works by itself, on the GPU if there is one."""
    return Group(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@contextlib.contextmanager
def join_group() -> Iterator[Group]:
    """Join the processes that the environment describes for as long as the block lasts; or work as a single one."""
    gpus = torch.cuda.device_count()
    if not one_of_several() or os.environ["WORLD_SIZE"] == "1":
        yield single_process()
        return
    local, peers = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and local >= gpus:
        raise BadConfig(f"train.processes={peers}: each process needs a GPU of its own, this machine shows {gpus}")
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    torch.set_num_threads(max(torch.get_num_threads() // peers, 1))
    if gpus:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    hosts = cast(dist.ProcessGroup, dist.new_group(backend="gloo")) if gpus else None
    yield Group(dist.get_rank(), dist.get_world_size(), device, hosts)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone


def no_sync(learner: nn.Module, *, unless: bool) -> contextlib.AbstractContextManager[None]:
    """Exchange no gradients in forward and backward of a batch `unless` it is the last of an accumulated update."""
    if unless or not isinstance(learner, DistributedDataParallel):
        return contextlib.nullcontext()
    return cast(contextlib.AbstractContextManager[None], learner.no_sync())


class _OwnRows(Function):
    """The whole batch as it is; backward, the own rows of it with their gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shard: Tensor, rank: int, world: int) -> Tensor:
        ctx.rank, ctx.world = rank, world
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, gradient[ctx.rank :: ctx.world] * ctx.world, None, None
