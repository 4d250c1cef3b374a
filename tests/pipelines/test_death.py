"""Runs that are ended from outside: what becomes of their steps, of what they left, and of what MLflow shows."""

import json
import multiprocessing.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from csc.pipelines.local.lock import exclusive_run

STEP = """
import os, pathlib, signal, subprocess, time
from kfp import dsl

def step(on_sigterm: str):
    def save(*_):
        print("state saved", flush=True)
        os._exit(3)
    if on_sigterm == "saves":
        signal.signal(signal.SIGTERM, save)
    if on_sigterm == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "60"])
    print("pids", os.getpid(), helper.pid, os.environ["TMPDIR"], flush=True)
    time.sleep(60)
"""

# Runs the step as `csc run` does; argument: how the step takes a SIGTERM, and how steps are started.
PARENT = """
import json, sys
from csc.pipelines.local.interrupts import interruptible
from csc.errors import Terminated
from csc.pipelines.local import processes
from csc.pipelines.local.steps import Step

if __name__ == "__main__":
    code, on_sigterm, method, folder = sys.argv[1:]
    processes.GRACE_SECONDS = 1
    inputs, outputs = {"parameterValues": {"on_sigterm": on_sigterm}}, {"outputFile": folder + "/step/out.json"}
    given = {"inputs": inputs, "outputs": outputs}
    command = ["sh", "-c", "x", code, "--executor_input", json.dumps(given), "--function_to_execute", "step"]
    try:
        with interruptible():
            processes.run_process(Step("", command, {"TMPDIR": folder}), lambda line: print(line, flush=True), method)
    except Terminated:
        sys.exit(143)
"""


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within some time; a zombie has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def start(folder: Path, on_sigterm: str, method: str) -> tuple["subprocess.Popen[str]", list[int]]:
    """A parent, and the processes of its step."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    words = [sys.executable, str(script), STEP, on_sigterm, method, str(folder)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    for line in parent.stdout:
        if line.startswith("pids"):
            *pids, temporary = line.split()[1:]
            assert temporary == str(folder)
            return parent, [int(pid) for pid in pids]
    raise AssertionError("the step never began")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_step_and_what_it_started_die_with_a_killed_parent(tmp_path: Path, method: str):
    parent, pids = start(tmp_path, "", method)
    with parent:
        parent.kill()
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(("on_sigterm", "said"), [("saves", "state saved\n"), ("ignores", "")])
def test_a_step_that_gets_a_sigterm_may_save_its_work_and_is_killed_if_it_ignores_it(
    tmp_path: Path, on_sigterm: str, said: str
):
    parent, pids = start(tmp_path, on_sigterm, "spawn")
    with parent:
        parent.terminate()
        assert parent.stdout.read() == said
    assert parent.returncode == 143
    assert all(gone(pid) for pid in pids)


RUN = {"scenario": "digits-b0c5", "data": "/data", "config": "{}"}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was marked in MLflow."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr("csc.pipelines.local.lock.close_run", lambda *words: calls.append(words))
    return calls


def killed(workdir: Path, name: str) -> list[Path]:
    """Leave what a killed run leaves; return its files."""
    folder = workdir / "tmp" / f"csc-run-{name}"
    left = [folder / "csc-step-1" / "x.py"]
    left += [workdir / kind / name / "task" / ".model.x1" / "f" for kind in ("pipeline", "checkpoints", "cache/1a2b")]
    left += [workdir / "runs" / f".{name}.yaml.x1"]
    for file in (*left, workdir / "pipeline" / name / "task" / "model"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (workdir / "runs").mkdir(exist_ok=True)
    content = json.dumps({**RUN, "temporary": str(folder)})
    (workdir / "runs" / f"{name}.lock").write_text(content)
    return left


def test_the_next_run_clears_what_killed_ones_left_and_closes_them_in_mlflow(tmp_path: Path, closed):
    left = [*killed(tmp_path, "one"), *killed(tmp_path, "two")]
    with exclusive_run(tmp_path, "one", RUN) as temporary:
        assert not [file for file in left if file.exists()]
        assert (tmp_path / "pipeline" / "one" / "task" / "model").is_file()
        assert temporary.is_dir()
        assert closed == [("digits-b0c5", "/data", "{}", "CANCELED", "")]  # run one is taken up again, not closed
    assert not temporary.exists()
    with exclusive_run(tmp_path, "three", RUN):
        assert len(closed) == 1


def test_temporary_files_of_libraries_are_where_the_next_run_clears_them(tmp_path: Path):
    before = tempfile.gettempdir()
    with exclusive_run(tmp_path, "one", RUN) as temporary:
        assert Path(tempfile.mkdtemp(prefix="kfp-workspace-")).parent == temporary
        assert Path(multiprocessing.util.get_temp_dir()) == temporary
    assert tempfile.gettempdir() == before
    assert multiprocessing.util.get_temp_dir() != str(temporary)


def test_what_a_run_that_goes_on_has_is_left_alone(tmp_path: Path, closed):
    with exclusive_run(tmp_path, "one", RUN) as temporary, exclusive_run(tmp_path, "two", RUN):
        assert temporary.is_dir()
    assert closed == []


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"temporary": "/"}'])
def test_a_lock_with_strange_content_is_taken(tmp_path: Path, content: str, closed):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one.lock").write_text(content)
    with exclusive_run(tmp_path, "two", RUN), exclusive_run(tmp_path, "one", RUN):
        pass
    assert closed == []
