"""A line that tells a person how training goes: rewritten in place on a terminal, one line per epoch in a log."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Progress"]

REFRESH = 0.2  # seconds


class Progress:
    """Counts the images of a task and prints where it stands.

    Args:
        title: names the task.
        epochs: in all.
        images_per_epoch: how many images an epoch has.
        stream: where to print; standard output if not given.
        finished: epochs that an earlier try has done.
    """

    def __init__(
        self, title: str, epochs: int, images_per_epoch: int, stream: TextIO | None = None, finished: int = 0
    ) -> None:
        self.title, self.epochs, self.images_per_epoch, self.finished = title, epochs, images_per_epoch, finished
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.started = self.shown = time.monotonic()
        self.done = 0

    def advance(self, epoch: int, images: int) -> None:
        """Count images of an epoch (from 0); on a terminal, refresh the line."""
        self.done += images
        now = time.monotonic()
        if self.live and now - self.shown >= REFRESH:
            self.shown = now
            self.stream.write("\r\x1b[K" + self._line(epoch, {}))
            self.stream.flush()

    def epoch(self, epoch: int, terms: Mapping[str, float]) -> None:
        """Print the finished epoch (from 0) with its mean loss terms."""
        self.done = (epoch + 1 - self.finished) * self.images_per_epoch
        self.stream.write(("\r\x1b[K" if self.live else "") + self._line(epoch, terms) + "\n")
        self.stream.flush()

    def _line(self, epoch: int, terms: Mapping[str, float]) -> str:
        speed = self.done / max(time.monotonic() - self.started, 1e-9)
        left = max((self.epochs - self.finished) * self.images_per_epoch - self.done, 0) / speed
        losses = "".join(f" · {name} {value:.4f}" for name, value in terms.items())
        return f"{self.title} · epoch {epoch + 1}/{self.epochs}{losses} · {speed:.0f} images/s · {left:.0f} s left"
