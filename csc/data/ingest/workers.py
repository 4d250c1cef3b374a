"""The same work for every part of a listing, in one or several processes; the results do not depend on how many."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from csc.data.ingest.shards import Part, cut_short

__all__ = ["for_each_part"]

GRACE = 5.0  # seconds in which a worker that must end may put away what it has half made

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def for_each_part(
    work: Callable[[_Given, Part], _Made], given: _Given, parts: Sequence[Part], workers: int
) -> Iterator[_Made]:
    """Do a piece of work for every part; yield the results in the order of the parts.

    The first part in that order that fails is the one whose error is raised, whoever finished first.

    Args:
        work: takes what is given and a part; a function that other processes can import.
        given: goes to every worker once, for instance where the images come from.
        parts: of the listing.
        workers: how many processes; no more are started than there are parts, and none for a single one.
    """
    count = min(workers, len(parts))
    if count <= 1:
        for part in parts:
            yield work(given, part)
        return
    context = multiprocessing.get_context("spawn")
    held, lifeline = context.Pipe(duplex=False)
    with (
        held,
        lifeline,
        ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(given, held)) as pool,
    ):
        try:
            yield from _in_order(functools.partial(_submit, pool, work), parts, count)
        except BrokenProcessPool:
            raise cut_short("a worker process was lost (memory may be short: try fewer --workers)") from None
        except (KeyboardInterrupt, GeneratorExit):
            lifeline.close()  # nobody waits for what is half made
            raise


def _in_order(submit: Callable[[Part], "Future[_Made]"], parts: Sequence[Part], count: int) -> Iterator[_Made]:
    """Yield results in the order of the parts; no more are handed out than are worked on, so that nothing queues up."""
    left, handed_out = deque(parts), deque[Future[_Made]]()
    while left or handed_out:
        running = [future for future in handed_out if not future.done()]
        if handed_out and handed_out[0].done():
            yield handed_out.popleft().result()
        elif left and len(running) < count:
            handed_out.append(submit(left.popleft()))
        else:
            wait(running, return_when=FIRST_COMPLETED)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Any, Part], _Made], part: Part) -> "Future[_Made]":
    """Hand out a part; processes that this starts never hear of Ctrl-C: the first process decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_work, work, part)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_given: Any  # of a worker process


def _start_worker(given: object, held: Connection) -> None:
    global _given
    _given = given
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_first, args=(held,), daemon=True).start()


def _end_with_first(held: Connection) -> None:
    """A first process that is killed or interrupted leaves no workers behind: the other end of its pipe is closed."""
    with contextlib.suppress(EOFError, OSError):
        held.recv()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _work(work: Callable[[Any, Part], _Made], part: Part) -> _Made:
    try:
        return work(_given, part)
    except SystemExit:  # which the pool would take for a result
        os._exit(1)
