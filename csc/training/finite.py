"""Losses and gradients that are not numbers, noticed without making the host wait for the device at every update."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FiniteWatch"]

EVERY = 50  # updates between two readings of a GPU's memory


@dataclass
class FiniteWatch:
    """Notes on the device in which update of an epoch a loss or a gradient was not a number for the first time."""

    device: torch.device
    skipped: int = 0  # updates of the epoch that an earlier try made

    def __post_init__(self) -> None:
        self.first = torch.full((2,), -1, device=self.device)  # of the loss, of the gradient
        self.rates: list[float] = []  # of each update

    def look(self, loss: Tensor, norm: Tensor | None, rate: float) -> None:
        """Look at an update: its loss, the norm of its gradient if that must be finite, and the learning rate."""
        values = torch.stack([loss, loss if norm is None else norm])
        self.first = torch.where(values.isfinite() | (self.first >= 0), self.first, len(self.rates))
        self.rates.append(rate)

    def is_due(self) -> bool:
        """Whether it is time to read what was noted; on the CPU that takes no time."""
        return self.device.type == "cpu" or len(self.rates) % EVERY == 0

    def found(self) -> tuple[str, int, float] | None:
        """What was not a number, in which update of the epoch (from 0) and at which rate; makes the host wait."""
        loss, gradient = self.first.tolist()
        if loss < 0 and gradient < 0:
            return None
        of_loss = gradient < 0 or 0 <= loss <= gradient
        number = loss if of_loss else gradient
        return "loss" if of_loss else "gradient", self.skipped + number, self.rates[number]
