"""Process the parts of a listing in one or several processes; the results do not depend on how many."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from csc.data.ingest.shard_writer import Part
from csc.errors import resumable_error

__all__ = ["for_each_part"]

GRACE = 5.0  # seconds in which a worker that must end may remove its temporary files

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def for_each_part(
    work: Callable[[_Given, Part], _Made], given: _Given, parts: Sequence[Part], workers: int
) -> Iterator[_Made]:
    """Call `work(given, part)` for every part; yield the results in the order of the parts.

    If several parts fail, the error of the first one in that order is raised.

    Args:
        work: a function that other processes can import.
        given: sent to every worker once, for instance where the images come from.
        parts: of the listing.
        workers: how many processes; no more than there are parts, and none for a single part.
    """
    count = min(workers, len(parts))
    if count <= 1:
        yield from (work(given, part) for part in parts)
        return
    context = multiprocessing.get_context("spawn")
    parent_gone, open_end = context.Pipe(duplex=False)
    with (
        parent_gone,
        open_end,
        ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(given, parent_gone)) as pool,
    ):
        try:
            with _interrupts_blocked():  # workers inherit it: only this process handles Ctrl-C
                results = [pool.submit(_work, work, part) for part in parts]
            for result in results:
                yield result.result()
        except BrokenProcessPool:
            raise resumable_error("a worker process was lost (memory may be short: try fewer --workers)") from None
        except (KeyboardInterrupt, GeneratorExit):
            open_end.close()  # ends the workers; to cancel as well would let the pool stumble over what is cancelled
            raise
        except Exception:
            pool.shutdown(cancel_futures=True)  # no part is begun after one that failed; those at work end first
            raise


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_given: Any  # of a worker process


def _start_worker(given: object, parent_gone: Connection) -> None:
    global _given
    _given = given
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_ingest, args=(parent_gone,), daemon=True).start()


def _end_with_ingest(parent_gone: Connection) -> None:
    """End this worker when the first process does, which closes the other end of the pipe."""
    with contextlib.suppress(EOFError, OSError):
        parent_gone.recv()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _work(work: Callable[[Any, Part], _Made], part: Part) -> _Made:
    try:
        return work(_given, part)
    except SystemExit:  # the pool would take it for a result
        os._exit(1)
