"""Batch-norm over the batch of all processes, under the names that the layers of one process have."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["sync_batch_norms"]


def sync_batch_norms(network: nn.Module, device: torch.device) -> None:
    """Let the batch-norm layers inside a network see the batch of all processes; parameters and their names stay."""
    if device.type == "cpu":
        _replace(network)
        return
    from timm.layers import convert_sync_batchnorm

    convert_sync_batchnorm(network)
    for layer in network.modules():
        if isinstance(layer, nn.SyncBatchNorm):
            layer.register_forward_pre_hook(_float_if_empty)


def _float_if_empty(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
    """Let a rank without rows send the statistics of nothing as float32, as other ranks do whatever they compute in."""
    return (inputs[0].float(),) if inputs[0].numel() == 0 else None


def _replace(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, _GlobalBatchNorm(child))
        else:
            _replace(child)


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
