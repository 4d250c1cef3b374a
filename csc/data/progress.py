"""Lines that tell a person how long work goes: rewritten in place on a terminal, a few of them in a log."""

import sys
import time
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Bar", "Progress"]

REFRESH = 0.2  # seconds
LOG_EVERY = 10.0  # seconds between two lines in a log, at least
LOG_LINES = 10  # at most, beside the last one


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


class Bar:
    """Counts the steps of any long work and prints where it stands; a `with` block closes it.

    On a terminal the line is rewritten in place. In a log a line appears at every tenth of the work, if that takes long
    enough. The last line, of work that came to its end, tells how long it took.

    Args:
        title: names the work.
        total: how many steps it has.
        unit: what a step is, in the plural.
        stream: where to print; standard output if not given.
        done: steps that an earlier try has done; they do not count as speed.
    """

    def __init__(self, title: str, total: int, unit: str, stream: TextIO | None = None, done: int = 0) -> None:
        self.title, self.total, self.unit, self.done, self.earlier = title, total, unit, done, done
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.started = self.shown = time.monotonic()
        self.logged = self._tenth()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write(self._last(), "\n")
        elif self.live:
            self._write("", "")  # what is printed next starts on a clean line

    def advance(self, steps: int = 1) -> None:
        """Count finished steps, and print if it is time to."""
        self.done += steps
        now = time.monotonic()
        if self.live and now - self.shown >= REFRESH:
            self.shown = now
            self._write(self._line(), "")
        elif not self.live and now - self.shown >= LOG_EVERY and self.logged < self._tenth() < LOG_LINES:
            self.shown, self.logged = now, self._tenth()
            self._write(self._line(), "\n")

    def _tenth(self) -> int:
        return self.done * LOG_LINES // max(self.total, 1)

    def _write(self, line: str, end: str) -> None:
        self.stream.write(("\r\x1b[K" if self.live else "") + line + end)
        self.stream.flush()

    def _line(self) -> str:
        left = (self.total - self.done) / max(self._speed(), 1e-9)
        return f"{self.title} · {self.done:,}/{self.total:,} {self.unit} · {self._pace()} · {_duration(left)} left"

    def _last(self) -> str:
        made = self.done - self.earlier
        return f"{self.title} · {made:,} {self.unit} · {self._pace()} · {_duration(time.monotonic() - self.started)}"

    def _speed(self) -> float:
        return (self.done - self.earlier) / max(time.monotonic() - self.started, 1e-9)

    def _pace(self) -> str:
        speed = self._speed()
        return f"{speed:,.0f} {self.unit}/s" if speed >= 10 else f"{speed:.1f} {self.unit}/s"


def _duration(seconds: float) -> str:
    """Read seconds as a person would say them.

    >>> [_duration(seconds) for seconds in (0.04, 59.4, 59.9, 3599, 3600, 100_000)]
    ['0 s', '59 s', '1 min 0 s', '59 min 59 s', '1 h 0 min', '27 h 46 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
