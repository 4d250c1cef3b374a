"""Retries inside a step: a store or server that does not answer is asked again, everything else fails at once.

A step that is called twice leaves what one call leaves, so after `Unavailable` it is called again in the same process,
after a pause that grows. MLflow repeats its own requests first; a try ends when that did not help.

The environment says how often; on a cluster the profile's `retry` puts it there. Without it a step is tried once.

    CSC_RETRY_TIMES   how often a step is tried again
    CSC_RETRY_WAIT    seconds before the first of these tries
    CSC_RETRY_FACTOR  by which each wait is longer than the one before
    CSC_RETRY_WITHIN  no new try later than so many seconds after the first one began
"""

import functools
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ParamSpec, TypeVar

from csc.errors import BadConfig, Unavailable

__all__ = ["Retries", "with_retries"]

PREFIX = "CSC_RETRY_"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Retries:
    """How often a step is tried again, and after which pauses; times are in seconds."""

    times: int = 0
    wait: float = 60.0
    factor: float = 2.0
    within: float = 7 * 86400.0

    @classmethod
    def from_environment(cls) -> "Retries":
        """What the environment asks for; a variable that is not set or empty has its default."""
        given = {item.name: os.environ.get(f"{PREFIX}{item.name.upper()}") for item in fields(cls)}
        return cls(**{name: _number(name, text) for name, text in given.items() if text})

    def environment(self) -> dict[str, str]:
        """The variables by which another process gets the same; none for what is the default anyway."""
        default = asdict(Retries())
        given = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {f"{PREFIX}{name.upper()}": f"{value:.15g}" for name, value in given.items()}


def _number(name: str, text: str) -> Any:
    whole, least = name == "times", int(name == "factor")
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1
    if not least <= number < math.inf:
        expected = f"expected a {'whole ' if whole else ''}number, {least} or more"
        raise BadConfig(f"{PREFIX}{name.upper()}={text}: {expected}")
    return number


def with_retries(step: Callable[P, T]) -> Callable[P, T]:
    """Have a step tried again as the environment says, as long as what it needs is unavailable."""

    @functools.wraps(step)
    def tried(*arguments: P.args, **options: P.kwargs) -> T:
        retries = Retries.from_environment()
        start, pause = time.monotonic(), retries.wait
        for number in range(1, retries.times + 1):
            try:
                return step(*arguments, **options)
            except Unavailable as error:
                if time.monotonic() - start + pause > retries.within:
                    raise
                reason = " ".join(str(error).split())
            # Outside the handler: the error keeps alive what the try held, such as a network on a GPU.
            gc.collect()
            print(f"retry: {reason}; trying again in {pause:g} s ({number} of {retries.times})", flush=True)
            time.sleep(pause)
            pause *= retries.factor
        return step(*arguments, **options)

    return tried
