"""Automatic mixed precision: in which numbers forward passes compute."""

from dataclasses import dataclass

import torch

from csc.config.schema import Config

__all__ = ["Precision"]


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
