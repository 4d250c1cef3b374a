"""SIGTERM, as Kubernetes sends it before it ends a pod: a real process saves, ends in time, and is resumed exactly."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from csc.data.views import View, read_view, write_view
from csc.distributed.group import join_group
from csc.distributed.launch import run
from csc.model import save_tensors
from tests.unit.training.bench import Bench, settings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]
ROOT = Path(__file__).parents[3]
UPDATES = 15  # 3 epochs of 5
GRACE_SECONDS = 30  # of Kubernetes
PROGRAM = """
import sys
from pathlib import Path
from tests.unit.training.test_stopping import to_its_end

to_its_end(Path(sys.argv[1]), int(sys.argv[2]))
"""


def learn(folder: str) -> None:
    """Train a second task, saying which update is under way, and keep the weights."""
    view = read_view(str(Path(folder) / "view.parquet"))
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
    run(learn, {"folder": str(folder)}, processes) if processes > 1 else learn(str(folder))


def start(folder: Path, processes: int) -> "subprocess.Popen[str]":
    """Train with a process of its own at the head."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(processes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("processes", "moments"), [(1, (1, 7)), (2, (3,))])
def test_a_process_that_is_told_to_end_saves_in_time_and_the_next_resumes_exactly(
    views: dict[int, View],
    tmp_path: Path,
    processes: int,
    moments: tuple[int, ...],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        write_view(views[2], tmp_path / name / "view.parquet")
    to_its_end(tmp_path / "whole", processes)
    assert capfd.readouterr().out.count("update\n") == UPDATES
    done = 0
    for moment in moments:
        with start(tmp_path / "stopped", processes) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            for _ in range(moment):
                next(line for line in lines if line == "update\n")
            process.send_signal(signal.SIGTERM)
            rest = process.communicate(timeout=GRACE_SECONDS)[0]
        assert process.returncode == 143
        done += moment + rest.count("update\n")
        assert f"asked to stop · saved after update {done % 5 or 5} of 5 in epoch {(done + 4) // 5};" in rest
    to_its_end(tmp_path / "stopped", processes)
    assert capfd.readouterr().out.count("update\n") == UPDATES - done
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "stopped"))
    assert all(whole[name].equal(resumed[name]) for name in whole)
