"""The lab of a try, and the table at the end of `make test-faults`."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lab import Lab


@pytest.fixture(scope="session")
def shared() -> Iterator[tuple[Path, dict[str, dict[str, Any]]]]:
    """The folder of undisturbed runs, and what is known of them."""
    with tempfile.TemporaryDirectory(prefix="csc-whole-") as folder:
        yield Path(folder), {}


@pytest.fixture
def lab(shared: tuple[Path, dict[str, dict[str, Any]]], request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Its folder has a short path: sockets of processes lie in it, and their addresses have 108 bytes at most."""
    made = Lab(Path(tempfile.mkdtemp(prefix="csc-try-")), *shared, lambda: request.getfixturevalue("servers"))
    yield made
    rows = [(row, number < made.safe) for number, row in enumerate(made.rows)]
    request.node.user_properties.append(("faults", rows))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print of every fault how often it was tried, survived and lost, and how a lost one is repeated."""
    tries, lost, repeat = Counter[str](), Counter[str](), list[str]()
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    failed = {report.nodeid for report in reports if getattr(report, "failed", False)}
    for report in reports:
        for rows in (rows for key, rows in getattr(report, "user_properties", ()) if key == "faults"):
            tries.update(row for row, _ in rows)
            found = [row for row, survived in rows if not survived]
            if not found and report.nodeid in failed:  # it ended before its row was reported
                found = [_fault(report.nodeid)[0]]
                tries.update(found)
            lost.update(found)
    for nodeid in sorted(failed):
        fault, seed = _fault(nodeid)
        repeat.append(f"make test-faults FAULT={fault} SEED={seed}")
    if os.environ.get("FAULTS") != "all":
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'fault':<40} {'tries':>6} {'survived':>9} {'lost':>5}")
    for row in sorted(tries):
        terminalreporter.write_line(f"{row:<40} {tries[row]:>6} {tries[row] - lost[row]:>9} {lost[row]:>5}")
    terminalreporter.write_line(f"{'all':<40} {tries.total():>6} {tries.total() - lost.total():>9} {lost.total():>5}")
    for report in terminalreporter.stats.get("skipped", ()):
        terminalreporter.write_line(f"not tried: {_fault(report.nodeid)[0]} ({report.longrepr[2]})")
    for line in repeat:
        terminalreporter.write_line(f"repeat a lost one: {line}")


def _fault(nodeid: str) -> tuple[str, str]:
    """The name of a fault and its seed."""
    fault, _, seed = nodeid.partition("[")[2].partition("]")[0].rpartition("-")  # xdist adds its group
    return fault, seed
