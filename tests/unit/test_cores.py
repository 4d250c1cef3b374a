"""The cores that processes may use: of the machine, and of the container they run in."""

from pathlib import Path
from typing import Any

import pytest

from csc.cli import main
from csc.data import cores as module
from csc.data.cores import cores
from csc.errors import CscError


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a container would say how much CPU time it gets, on a machine of eight cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(module, "QUOTA", tmp_path / "cpu.max")
    return tmp_path / "cpu.max"


def test_without_a_quota_all_cores_of_this_process_count(quota: Path):
    assert cores() == 8
    quota.write_text("max 100000\n")
    assert cores() == 8


@pytest.mark.parametrize(("text", "expected"), [("200000 100000", 2), ("350000 100000", 3), ("50000 100000", 1)])
def test_a_quota_counts_in_whole_cores_and_at_least_one(text: str, expected: int, quota: Path):
    quota.write_text(f"{text}\n")
    assert cores() == expected


def test_a_quota_above_the_cores_of_this_process_adds_none(quota: Path):
    quota.write_text("1600000 100000\n")
    assert cores() == 8


def test_a_system_that_knows_no_affinity_counts_all_its_cores(quota: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("os.sched_getaffinity")  # as on macOS
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert cores() == 6
    quota.write_text("200000 100000\n")
    assert cores() == 2


def test_ingest_takes_the_cores_of_its_container_by_itself(quota: Path, monkeypatch: pytest.MonkeyPatch):
    quota.write_text("300000 100000\n")
    workers = list[int]()

    def ingest(*_: Any, options: Any) -> None:
        workers.append(options.workers)
        raise CscError("enough is known")

    monkeypatch.setattr("csc.data.ingest.digits.ingest_digits", ingest)
    for words in ([], ["--workers", "5"]):
        assert main(["ingest", "digits", "--out", "nowhere", *words]) == 2
    assert workers == [3, 5]
