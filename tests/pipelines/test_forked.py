"""Steps that are forks of one process: own output, own environment, right exit codes, also side by side."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kfp.local import subprocess_task_handler

from csc.pipelines.local.forked import forked_steps

CODE = """
import os, sys
from kfp import dsl

def step(ends: str):
    print("torch" in sys.modules, os.environ.get("GIVEN"), os.environ.get("_KFP_RUNTIME"), os.getpid())
    print("to standard error", file=sys.stderr)
    if ends == "raises":
        raise ValueError("as it was told")
    if ends == "exits":
        sys.exit(7)
"""


def command(folder: Path, name: str, ends: str) -> list[str]:
    outputs = {"outputFile": str(folder / f"{name}.json")}
    given = {"inputs": {"parameterValues": {"ends": ends}}, "outputs": outputs}
    return ["sh", "-c", "script", CODE, "--executor_input", json.dumps(given), "--function_to_execute", "step"]


@pytest.mark.slow
def test_steps_are_forks_with_their_own_output_environment_and_exit_code(tmp_path: Path, capfd):
    endings = ["well", "raises", "exits", "well"] * 3
    with forked_steps():
        run = subprocess_task_handler.run_local_subprocess
        with ThreadPoolExecutor(2) as threads:
            commands = [command(tmp_path, str(number), ends) for number, ends in enumerate(endings)]
            codes = list(threads.map(lambda words: run(words, {"GIVEN": "here"}), commands))
    assert codes == [{"well": 0, "raises": 1, "exits": 7}[ends] for ends in endings]
    told = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("True here")]
    assert len(told) == len(endings)
    assert {words[2] for words in told} == {"true"}
    assert len({words[3] for words in told} | {str(os.getpid())}) == len(endings) + 1
    assert (tmp_path / "0.json").is_file()


def test_afterwards_kfp_starts_processes_as_before():
    before = subprocess_task_handler.run_local_subprocess
    with forked_steps():
        assert subprocess_task_handler.run_local_subprocess is not before
    assert subprocess_task_handler.run_local_subprocess is before
    assert "_KFP_RUNTIME" not in os.environ
