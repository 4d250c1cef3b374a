"""Progress lines: rewritten in place on a terminal, a few of them in a log.

A command that draws the progress of its steps itself sets `CSC_PROGRESS` for them. They then print a `ProgressTick`
every now and then, as a line by itself.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TextIO

__all__ = ["Bar", "Progress", "ProgressTick", "duration"]

REFRESH = 0.2  # seconds
LOG_EVERY = 10.0  # seconds between two lines in a log, at least
LOG_LINES = 10  # at most, without the last one
_TICK = "@progress "  # how the line of a tick begins


@dataclass(frozen=True)
class ProgressTick:
    """How far a work has come, for whoever draws it; `left` are the seconds until all of it is done."""

    title: str
    done: int
    total: int
    unit: str
    speed: float
    left: float

    def __str__(self) -> str:
        return f"{_TICK}{json.dumps(asdict(self))}"

    @classmethod
    def parse(cls, line: str) -> "ProgressTick | None":
        """Read a line that a step has printed; None if it is any other line."""
        return cls(**json.loads(line.removeprefix(_TICK))) if line.startswith(_TICK) else None


class _Line:
    """A line that is rewritten on a terminal; standard output if no stream is given."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.ticks = not self.live and bool(os.environ.get("CSC_PROGRESS"))
        self.started = self.shown = time.monotonic()

    def _is_due(self, seconds: float) -> bool:
        return time.monotonic() - self.shown >= seconds

    def _write(self, line: str, end: str = "") -> None:
        self.shown = time.monotonic()
        self.stream.write(("\r\x1b[K" if self.live else "") + line + end)
        self.stream.flush()

    def _per_second(self, count: float) -> float:
        return count / max(time.monotonic() - self.started, 1e-9)


class Progress(_Line):
    """The progress of a training task; `finished` epochs of an earlier attempt do not count as speed."""

    def __init__(
        self, title: str, epochs: int, images_per_epoch: int, stream: TextIO | None = None, finished: float = 0
    ) -> None:
        super().__init__(stream)
        self.title, self.epochs, self.images_per_epoch, self.finished = title, epochs, images_per_epoch, finished
        self.done = 0.0

    def advance(self, epoch: int, images: int) -> None:
        """Count images of an epoch (from 0); on a terminal, refresh the line."""
        self.done += images
        if self.live and self._is_due(REFRESH):
            self._write(self._line(epoch, {}))
        elif self.ticks and self._is_due(REFRESH):
            self._write(str(self._tick(epoch)), "\n")

    def epoch(self, epoch: int, terms: Mapping[str, float]) -> None:
        """Print the finished epoch (from 0) with its mean loss terms."""
        self.done = round((epoch + 1 - self.finished) * self.images_per_epoch)
        self._write(self._line(epoch, terms), "\n")

    def _tick(self, epoch: int) -> ProgressTick:
        done = round(self.done - (epoch - self.finished) * self.images_per_epoch)
        title = f"epoch {epoch + 1}/{self.epochs}"
        return ProgressTick(title, done, self.images_per_epoch, "images", self._per_second(self.done), self._left())

    def _left(self) -> float:
        missing = (self.epochs - self.finished) * self.images_per_epoch - self.done
        return max(missing, 0) / max(self._per_second(self.done), 1e-9)

    def _line(self, epoch: int, terms: Mapping[str, float]) -> str:
        speed, left = self._per_second(self.done), self._left()
        losses = " · loss" * bool(terms) + " ·".join(f" {name} {value:.4f}" for name, value in terms.items())
        return f"{self.title} · epoch {epoch + 1}/{self.epochs}{losses} · {speed:.0f} images/s · {left:.0f} s left"


class Bar(_Line):
    """The progress of any other long work; use it as a context manager.

    A log gets a line at every tenth of the work, if that takes long enough, and one at the end with the duration.
    Steps that an earlier attempt has `done` do not count as speed.
    """

    def __init__(self, title: str, total: int, unit: str, stream: TextIO | None = None, done: int = 0) -> None:
        super().__init__(stream)
        self.title, self.total, self.unit, self.done, self.earlier = title, total, unit, done, done
        self.logged = self._tenth()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self.started
            self._write(f"{self.title} · {self.done - self.earlier:,} {self._pace()} · {duration(seconds)}", "\n")
        elif self.live:
            self._write("")  # the next output starts on a clean line

    def advance(self, steps: int) -> None:
        """Count finished steps, and print if it is time to."""
        self.done += steps
        if self.live and self._is_due(REFRESH):
            self._write(self._line())
        elif self.ticks and self._is_due(REFRESH):
            self._write(str(self._tick()), "\n")
        elif not self.live and self._is_due(LOG_EVERY) and self.logged < self._tenth() < LOG_LINES:
            self.logged = self._tenth()
            self._write(self._line(), "\n")

    def _tenth(self) -> int:
        return self.done * LOG_LINES // max(self.total, 1)

    def _tick(self) -> ProgressTick:
        speed = self._per_second(self.done - self.earlier)
        left = (self.total - self.done) / max(speed, 1e-9)
        return ProgressTick(self.title, self.done, self.total, self.unit, speed, left)

    def _line(self) -> str:
        left = self._tick().left
        return f"{self.title} · {self.done:,}/{self.total:,} {self._pace()} · {duration(left)} left"

    def _pace(self) -> str:
        speed = self._per_second(self.done - self.earlier)
        return f"{self.unit} · {speed:,.{0 if speed >= 10 else 1}f} {self.unit}/s"


def duration(seconds: float) -> str:
    """Format seconds for a person.

    >>> [duration(seconds) for seconds in (0.04, 59.4, 59.9, 3599, 3600, 100_000)]
    ['0 s', '59 s', '1 min 0 s', '59 min 59 s', '1 h 0 min', '27 h 46 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
