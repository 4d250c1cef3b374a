"""Mutations of valid files, and how a parser is tried with them.

`seeds/` has the files that mutations start from: small valid ones, and such that once led to a traceback. FUZZ_EXAMPLES
says how many mutations of each parser are tried.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csc.errors import CscError

SEEDS = Path(__file__).parent / "seeds"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
LONGEST = 5.0  # seconds that a parser may take
TOKENS = [b"null", b"-1", b"1e999", b"[]", b"\\ud800", b"\x00", b"\xff", b"[" * 2000, b"9" * 40, b"<", b"&", b'"', b","]


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> bytes:
    """A seed in which a few bytes were changed, cut out, doubled or replaced by something that parsers dislike."""
    content = bytearray(draw(st.sampled_from(sorted(SEEDS.glob(kind)))).read_bytes())
    for _ in range(draw(st.integers(0, 6))):
        offset = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.integers(1, 40))
        change = draw(st.sampled_from(["byte", "cut", "double", "token"]))
        if change == "byte" and content:
            content[offset] = draw(st.integers(0, 255))
        elif change == "cut":
            del content[offset : offset + length]
        elif change == "double":
            content[offset:offset] = content[offset : offset + length]
        else:
            content[offset:offset] = draw(st.sampled_from(TOKENS))
    return bytes(content)


def fuzz(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with mutations of the seeds of one kind."""
    limits = settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
    )
    return lambda test: limits(given(content=mutated(kind))(test))


def attempt(action: Callable[[], object]) -> None:
    """A refusal must be one line, and come soon; what counts is our own time, whatever else the machine does."""
    message, started = "", time.process_time()
    try:
        action()
    except CscError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    assert time.process_time() - started < LONGEST
