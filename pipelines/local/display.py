"""What a person sees of a run: nothing, plain lines, or a live display (`csc.pipelines.local.live_display`)."""

import re
import threading
import time
from collections.abc import Iterable
from typing import Self, TextIO

from csc.data.progress import ProgressTick

__all__ = ["WORTH_SHOWING", "Display", "PlainDisplay"]

WORTH_SHOWING = re.compile(r"task \d|data: |note: |retry: ")  # how our steps begin their lines; the rest is in the log
_SILENCE = 60.0  # seconds after which a step that says nothing is reported; doubled each time


class Display:
    """What a display may do; this one shows nothing."""

    reports = False  # whether steps shall report their progress within a line of their own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        """Something to tell between the steps."""

    def expect(self, titles: Iterable[str]) -> None:
        """The run has these steps."""

    def begin(self, title: str) -> None:
        """A step begins."""

    def line(self, line: str) -> None:
        """The step has printed a line."""

    def progress(self, tick: ProgressTick) -> None:
        """The step has come so far."""

    def end(self, title: str, seconds: float) -> None:
        """The step has succeeded."""

    def reuse(self, title: str) -> None:
        """The outputs of a step are those of an earlier run."""


class PlainDisplay(Display):
    """Plain lines, for pipes and logs; with `verbose`, everything that the steps print."""

    def __init__(self, out: TextIO, *, verbose: bool = False) -> None:
        self.out, self.verbose = out, verbose
        self.current = self.last = ""
        self._started = self._shown = time.monotonic()
        self._silence_limit = _SILENCE
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def begin(self, title: str) -> None:
        """Print its title."""
        self.current, self.last, self._started = title, "no output yet", time.monotonic()
        self.say(title)

    def line(self, line: str) -> None:
        """Print it if it tells something."""
        self.last = line or self.last
        if self.verbose or WORTH_SHOWING.match(line):
            self.say(f"  {line}")

    def end(self, title: str, seconds: float) -> None:
        """Print how long it took."""
        self.current = ""
        self.say(f"  done in {seconds:.1f} s")

    def reuse(self, title: str) -> None:
        """Print that it is reused."""
        self.say(f"{title:<24} reused")

    def break_silence(self, now: float) -> None:
        """Say what a step is at if nothing was shown for long: it may wait for a server, or compute."""
        if self.current and now - self._shown > self._silence_limit:
            self._silence_limit *= 2
            self._print(f"  running for {now - self._started:.0f} s; its last line: {self.last}")

    def _watch(self) -> None:
        while not self._ended.wait(1):
            self.break_silence(time.monotonic())

    def say(self, line: str) -> None:
        """Print it."""
        self._shown, self._silence_limit = time.monotonic(), _SILENCE
        self._print(line)

    def _print(self, line: str) -> None:
        self.out.write(f"{line}\n")  # kfp replaces print
        self.out.flush()
