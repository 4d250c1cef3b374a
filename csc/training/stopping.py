"""A request to stop: SIGTERM, as Kubernetes sends it some seconds before it ends a pod."""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from csc.distributed.process import signal_handlers

__all__ = ["STOPPED", "StopRequest", "stop_request"]

STOPPED = 128 + signal.SIGTERM  # the exit code; who runs steps takes it for an interruption, and tries again


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    received: bool = False


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Have SIGTERM note a request instead of ending the process, for as long as the block lasts."""
    request = StopRequest()

    def note(number: int, frame: object) -> None:
        request.received = True

    with signal_handlers({signal.SIGTERM: note}):
        yield request
