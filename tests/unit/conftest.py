"""What tests of single modules share."""

import multiprocessing
from types import SimpleNamespace

import pytest


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of an ingest be forks: to start Python for each takes a second of processor time.

    For what several of them make of a data set. How they are started, sent their work, interrupted and lost is tested
    with real ones.
    """
    forking = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr("csc.data.ingest.workers.multiprocessing", forking)
