"""SIGTERM, as Kubernetes sends it before it ends a pod: a real process saves, ends in time, and is resumed exactly."""

import multiprocessing
import os
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import pytest
from safetensors.torch import load_file

from csc.data.views import View
from csc.distributed.group import join_group
from csc.distributed.launch import run_in_processes
from csc.storage.tensors import save_tensors
from tests.unit.training.bench import Bench, settings
from tests.unit.training.ranks import forked_ranks

pytestmark = pytest.mark.slow
UPDATES = 15  # 3 epochs of 5
GRACE_SECONDS = 30  # of Kubernetes


def learn(folder: str) -> None:
    """Train a second task, saying which update is under way, and keep the weights."""
    view = View.read(str(Path(folder) / "view.parquet"))
    with join_group() as group:
        config = settings("method=lwf", "train.epochs=3", "train.batch_size=4", "input.augment=true")
        trainer = Bench({2: view}, Path(folder)).second(config, group=group)

        def say(*_: object) -> None:
            if group.is_main:
                print("update", flush=True)
            time.sleep(0.05)

        trainer.optimizer.register_step_pre_hook(say)
        trainer.run()
        if group.is_main:
            save_tensors(trainer.network.state_dict(), Path(folder) / "weights.safetensors")


def to_its_end(folder: Path, processes: int) -> None:
    """Train with this process at the head."""
    if processes == 1:
        return learn(str(folder))
    with forked_ranks():
        return run_in_processes(learn, {"folder": str(folder)}, processes)


def start(folder: Path, processes: int) -> tuple[BaseProcess, IO[str]]:
    """Train with a process of its own at the head, a fork of this one; return it and what it prints."""
    reader, writer = os.pipe()

    def head() -> None:
        os.dup2(writer, 1)
        sys.stdout = os.fdopen(1, "w")
        to_its_end(folder, processes)

    process = multiprocessing.get_context("fork").Process(target=head)
    process.start()
    os.close(writer)
    return process, os.fdopen(reader)


@pytest.mark.parametrize(("processes", "moments"), [(1, (1, 7)), (2, (3,))])
def test_a_process_that_is_told_to_end_saves_in_time_and_the_next_resumes_exactly(
    views: dict[int, View],
    tmp_path: Path,
    processes: int,
    moments: tuple[int, ...],
    capfd: pytest.CaptureFixture[str],
):
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        views[2].write(tmp_path / name / "view.parquet")
    to_its_end(tmp_path / "whole", processes)
    assert capfd.readouterr().out.count("update\n") == UPDATES
    done = 0
    for moment in moments:
        process, printed = start(tmp_path / "stopped", processes)
        with printed:
            for _ in range(moment):
                next(line for line in printed if line == "update\n")
            process.terminate()
            asked = time.monotonic()
            rest = printed.read()
        process.join()
        assert time.monotonic() - asked < GRACE_SECONDS
        assert process.exitcode == 143
        done += moment + rest.count("update\n")
        assert f"asked to stop · saved after update {done % 5 or 5} of 5 in epoch {(done + 4) // 5};" in rest
    to_its_end(tmp_path / "stopped", processes)
    assert capfd.readouterr().out.count("update\n") == UPDATES - done
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "stopped"))
    assert all(whole[name].equal(resumed[name]) for name in whole)
