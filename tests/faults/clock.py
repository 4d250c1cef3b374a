"""Clocks that jump: a month ahead while a task is trained, and more than a year back after it."""

from pathlib import Path
from random import Random

import pytest

from tests.debian import install
from tests.faults.commands import Lost, Moment, Running
from tests.faults.judge import judge
from tests.faults.lab import Lab

JUMPS = {"ahead": ("+30d", "+31d"), "back": ("-400d", "-401d"), "to and fro": ("+30d", "-400d")}


def jump(lab: Lab, rng: Random) -> None:
    """The clock of the command and its steps jumps twice, in the first task and in the second."""
    library = faketime()
    for name, (first, second) in JUMPS.items():
        folder = lab.folder / name
        folder.mkdir()
        offset = folder / "offset"
        offset.write_text("+0d")
        workspace = lab.run(folder=folder)
        workspace.forked = False
        workspace.variables = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

        def jumps(running: Running, file: Path = offset, offsets: tuple[str, str] = (first, second)) -> None:
            for text, line in zip(offsets, (r"^task 1 · evaluate$", r"task 2/2 · epoch 1"), strict=True):
                file.write_text(text)
                running.wait_for(Moment(line=line))

        running = workspace.disturb(Moment(line=r"task 1/2 · epoch 1"), rng, jumps)
        lab.tried(f"clock jumps {name}")
        if running.process.returncode != 0:
            raise Lost(f"exit code {running.process.returncode}: {running.end_of_output}")
        judge(workspace, lab.undisturbed())
        lab.survived()


def faketime() -> Path:
    """The library that changes the time a process sees; skips if it is not there and may not be installed."""
    for again in (False, True):
        libraries = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        if (found := next(iter(sorted(libraries)), None)) is not None:
            return found
        if not again:
            install("libfaketime", missing="no libfaketime")
    pytest.skip("no libfaketime: installed, but not where Debian puts it")
