"""Steps that are forks of one process: own output, own environment, right exit codes."""

import json
import os
from pathlib import Path

import kfp
import pytest
from kfp import dsl, local
from kfp.local import subprocess_task_handler

from csc.pipelines.local.forked import forked_steps, run_forked
from csc.pipelines.local.handler import KFP_VERSION, steps_started_by

CODE = """
import os, sys
from kfp import dsl

def step(ends: str):
    print("torch" in sys.modules, os.environ.get("GIVEN"), os.environ.get("_KFP_RUNTIME"), os.getpid(), flush=True)
    print("to standard error", file=sys.stderr)
    if ends == "raises":
        raise ValueError("as it was told")
    if ends == "exits":
        sys.exit(7)
    if ends == "killed":
        os.kill(os.getpid(), 9)
"""


def command(folder: Path, name: str, ends: str) -> list[str]:
    outputs = {"outputFile": str(folder / f"{name}.json")}
    given = {"inputs": {"parameterValues": {"ends": ends}}, "outputs": outputs}
    return ["sh", "-c", "script", CODE, "--executor_input", json.dumps(given), "--function_to_execute", "step"]


@pytest.mark.slow
def test_steps_are_forks_with_their_own_output_environment_and_exit_code(tmp_path: Path, capfd):
    endings = {"well": 0, "raises": 1, "exits": 7, "killed": -9}
    with forked_steps():
        codes = [run_forked(command(tmp_path, ends, ends), {"GIVEN": "here"}) for ends in endings]
    assert codes == list(endings.values())
    said = capfd.readouterr().out
    told = [line.split() for line in said.splitlines() if line.startswith("True here")]
    assert len(told) == len(endings)
    assert {words[2] for words in told} == {"true"}
    assert len({words[3] for words in told} | {str(os.getpid())}) == len(told) + 1
    assert "the step was ended by SIGKILL" in said
    assert (tmp_path / "well.json").is_file()


def test_what_we_replace_in_kfp_was_read_in_the_version_that_is_installed():
    """After an upgrade: read how kfp/local/task_dispatcher.py makes and runs a handler, then raise KFP_VERSION."""
    assert kfp.__version__.rpartition(".")[0] == KFP_VERSION


def test_kfp_hands_a_step_to_our_function_and_afterwards_to_its_own(tmp_path: Path):
    @dsl.component(base_image="some/image:1")
    def step(word: str): ...

    seen = []
    before = subprocess_task_handler.SubprocessTaskHandler
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path))
    ours = steps_started_by(lambda image, command, environment: seen.append((image, command, environment)) or 1)
    with ours, pytest.raises(RuntimeError, match="FAILURE"):
        step(word="hello")
    ((image, words, environment),) = seen
    assert (image, environment) == ("some/image:1", {})
    assert words[0] == "sh"
    assert json.loads(words[words.index("--executor_input") + 1])["inputs"]["parameterValues"] == {"word": "hello"}
    assert subprocess_task_handler.SubprocessTaskHandler is before
    with forked_steps():
        pass
    assert "_KFP_RUNTIME" not in os.environ
