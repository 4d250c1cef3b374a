"""What tests of pipelines share."""

import functools
import inspect
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_compiling() -> Iterator[None]:
    """For every setting of a step kfp asks who calls it; pytest's calls are deep, and reading their source is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", functools.partial(inspect.stack, context=0))
        yield
