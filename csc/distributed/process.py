"""What this process sets for the length of a block: handlers of signals, and variables of its environment."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

__all__ = ["environment", "signal_handlers"]

Handler = Callable[[int, FrameType | None], object] | int | None


@contextlib.contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Have signals handled in another way. Outside the main thread, which alone gets signals, nothing changes."""
    before: dict[signal.Signals, Handler] = {}
    try:
        with contextlib.suppress(ValueError):  # not the main thread
            for number, handler in handlers.items():
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables."""
    added = variables.keys() - os.environ.keys()
    before = {name: os.environ[name] for name in variables.keys() - added}
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.update(before)
        for name in added:
            del os.environ[name]
