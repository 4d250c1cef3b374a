"""Networks where they run: on a device, in the memory format and the precision that are fastest there."""

import copy
import ctypes
import sys
from dataclasses import dataclass

import torch

from csc.config.schema import Config
from csc.nets.backbone import Backbone
from csc.nets.folding import fold_batch_norms
from csc.nets.network import Network

__all__ = ["Precision", "disable_malloc_trim", "for_inference", "memory_format", "to_device"]

CHANNELS_LAST_ON_CPU = ("tf_efficientnet", "efficientnet", "tresnet", "test_resnet")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class Precision:
    """Automatic mixed precision of forward passes, and the scaling that float16 gradients need."""

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


def to_device(network: Network, config: Config, device: torch.device, *, learns: bool = True) -> Network:
    """Move a network to a device; it is the same network afterwards."""
    if device.type == "cpu":
        disable_malloc_trim()
    return network.to(device).to(memory_format=memory_format(config, device, learns=learns))


def for_inference(network: Network, config: Config, device: torch.device) -> Network:
    """A copy of a network that says the same with less work: in evaluation mode, batch-norms folded."""
    frozen = copy.deepcopy(network).eval().requires_grad_(False)
    if isinstance(frozen.backbone, Backbone):
        fold_batch_norms(frozen.backbone.net)
    return to_device(frozen, config, device, learns=False)


def memory_format(config: Config, device: torch.device, *, learns: bool = True) -> torch.memory_format:
    """How the network's tensors lie in memory.

    Channels last is faster on GPUs for all networks; on a CPU for forward passes alone, and for the training of those
    that were measured to be (`make bench` (step)).
    """
    wanted = config.train.channels_last
    auto = device.type == "cuda" or not learns or config.backbone.name.startswith(CHANNELS_LAST_ON_CPU)
    return torch.channels_last if wanted == "on" or (wanted == "auto" and auto) else torch.contiguous_format


def disable_malloc_trim() -> None:
    """Have the memory that this process frees stay with it, for its next step.

    A step frees gigabytes and asks for them again. glibc gives large pieces back to the system at once, which then has
    to clear every page of them: up to a quarter of the time of a step. Where there is no glibc, nothing happens.
    """
    if sys.platform != "linux":
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_MMAP_MAX, 0)  # no mapping for a single piece of memory
        tune(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
