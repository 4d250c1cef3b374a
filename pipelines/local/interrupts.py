"""Ctrl-C and SIGTERM end a run once what they interrupt is closed, and are never lost.

Python raises the exception of a signal wherever the program happens to be, and drops it if that is a finaliser or a
callback of the garbage collector. So a signal is also remembered, and no step begins after one.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from csc.distributed.process import signal_handlers
from csc.errors import Terminated

__all__ = ["interruptible", "raise_if_interrupted"]

_received: list[int] = []  # signals since `interruptible` began


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, so that whoever ends this process with `kill` leaves nothing open either."""
    _received.clear()
    handlers = {signal.SIGTERM: _stop}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell script
        handlers[signal.SIGINT] = _stop
    with signal_handlers(handlers):
        yield


def raise_if_interrupted() -> None:
    """Raise the exception of a signal that has come."""
    if _received:
        raise Terminated if _received[0] == signal.SIGTERM else KeyboardInterrupt


def _stop(number: int, _: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # already stopping
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
