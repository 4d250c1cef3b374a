"""`csc run` as a person sees it: on a terminal, in a pipe, and when it is told to end."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
from pathlib import Path

import pytest

from tests.faults.starter import Forked
from tests.integration.conftest import SMALL, command, csc, environment, last_results
from tests.tracked import fresh_database

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pipeline")]


def on_a_terminal(words, interrupt_at=None):
    """Run a command on a pseudo-terminal; return its exit code and all that was drawn, one frame per line."""
    terminal, other_side = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    started = Forked(words, {**environment(), "TERM": "xterm-256color"}, terminal=os.ttyname(other_side))
    drawn = os.read(terminal, 65536)
    os.close(other_side)  # the command has it open by now
    while True:
        try:
            drawn += os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if interrupt_at and interrupt_at.encode() in drawn:
            os.write(terminal, b"\x03")  # Ctrl-C
            interrupt_at = None
    os.close(terminal)
    return started.wait(), drawn.decode(errors="replace")


def plain(drawn):
    """The lines of all frames, without colours and movements of the cursor."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))


def bars(drawn):
    """What the terminal showed of epoch 1 of the first task, in order."""
    return list(dict.fromkeys(line[1:] for line in plain(drawn) if "task 1 · train" in line and "epoch 1/2" in line))


def test_a_terminal_sees_the_bar_move_within_an_epoch_and_the_time_left(undisturbed, scenes, tmp_path):
    fresh_database(tmp_path)
    slower = (*SMALL, "train.batch_size=2", "input.size=128")  # an epoch of many frames, on a fast machine too
    words = command("run", "digits-b0c5", "--data", scenes, "--workdir", tmp_path, settings=slower)
    code, drawn = on_a_terminal(words)
    assert code == 0, drawn[-2000:]
    assert len(bars(drawn)) > 2, bars(drawn)
    lines = plain(drawn)
    assert any(re.search(r"task 1: \d+ s left · scenario: about .* left", line) for line in lines)
    for task in (1, 2):
        assert any(line.startswith(f"✓ task {task}   mAP ") for line in lines)
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    assert "\x1b" not in undisturbed[1]  # which went into a pipe


def test_ctrl_c_on_a_terminal_leaves_it_sane_and_the_run_can_be_resumed(undisturbed, scenes, tmp_path):
    fresh_database(tmp_path)
    words = command("run", "digits-b0c4", "--data", scenes, "--workdir", tmp_path)
    code, drawn = on_a_terminal(words, interrupt_at="✓ \x1b[0mtask 1")
    assert code == 130, drawn[-2000:]
    assert plain(drawn)[-2].startswith("csc: interrupted in task ")
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    assert statuses(tmp_path) == {"KILLED"}
    done = csc("run", "digits-b0c4", "--data", scenes, "--workdir", tmp_path, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [task["metrics"] for task in results["run"]["tasks"]] == last_results(undisturbed[0])
    assert results["model"] == "models:/digits-b0c4-csc/3"
    assert "task 1 · train" in results["reused"]
    assert done.stderr == ""
    assert statuses(tmp_path) == {"FINISHED"}


def statuses(workdir):
    """How the runs stand in MLflow that are not finished; if all are, FINISHED."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{workdir}/mlflow.db")
    experiment = client.get_experiment_by_name("csc-digits")
    found = {run.info.status for run in client.search_runs([experiment.experiment_id])}
    return found - {"FINISHED"} or found


def signalled(words, moment, number, errors):
    """Start a command in a pipe and send it a signal at a moment; return how it ended and what it said of that."""
    victim = Forked(words, environment(), str(errors))
    with victim.stdout as lines:
        assert any(moment in line for line in lines), f"the run never came to '{moment}': {errors.read_text()}"
        os.kill(victim.pid, number)
        lines.read()
    return victim.wait(), errors.read_text()


def test_sigterm_ends_a_run_with_143_and_killed_runs_are_closed_by_the_next_one(scenes, tmp_path):
    fresh_database(tmp_path)
    words = command("run", "digits-b0c5", "--data", scenes, "--workdir", tmp_path)
    code, said = signalled(words, "task 1/2 · epoch 1/2", signal.SIGTERM, tmp_path / "said")
    assert code == 143, said
    assert re.search(r"csc: ended by SIGTERM in task 1 · \w+; the same command resumes the work", said), said
    assert statuses(tmp_path) == {"KILLED"}
    assert signalled(words, "task 2/2 · epoch 1/2", signal.SIGKILL, tmp_path / "said")[0] == -signal.SIGKILL
    assert statuses(tmp_path) == {"RUNNING"}
    (lock,) = (tmp_path / "runs").glob("*.lock")
    temporary = json.loads(lock.read_text())["temporary"]
    other = csc("run", "digits-b0c5", "--data", scenes, "--workdir", tmp_path, "--seed", 1, "--tasks", "1")
    assert other.returncode == 0, other.stderr
    assert statuses(tmp_path) <= {"KILLED", "RUNNING"}  # the other's own run waits for the rest of its tasks
    assert "KILLED" in statuses(tmp_path)
    assert not Path(temporary).exists()
    assert lock.read_text() == ""
