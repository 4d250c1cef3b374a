"""What all tests share."""

import gc
import inspect
import os
from collections.abc import Iterator

import pytest

from tests.frames import callers

# Tests run in several processes; threads of each would fight for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Some virtual machines announce AMX and end whoever uses it; bfloat16 needs none of it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Tests fork processes that have threads. What a fork has of its parent is never collected there: objects of C libraries
# may need threads that the fork does not have.
os.register_at_fork(after_in_child=gc.freeze)

SERVICES = {"store", "browser", "scoring"}  # fixtures; databases and tracking servers stand on the first


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what needs a service, and keep the tests of a file in one process, so that what they share is made once.

    Done as each test is found: xdist reads the groups before a hook of this file could set them later.
    """
    if SERVICES & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.services)
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.nodeid  # a doctest of the library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups that have slow tests: one that began last would keep the other processes waiting."""
    slow = {_group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: _group(item) not in slow)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no later search for garbage needs to look at it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries that count what they leave behind see it go."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_compiling() -> Iterator[None]:
    """Let kfp find its callers without looking at every loaded module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", callers)
        yield
