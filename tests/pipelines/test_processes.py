"""Steps that are processes of their own: own output, own environment, right exit codes."""

import json
import os
from pathlib import Path

import kfp
import pytest
from kfp import dsl, local
from kfp.local import subprocess_task_handler

from csc.pipelines.local.processes import import_libraries_once, run_process
from csc.pipelines.local.steps import KFP_VERSION, Step, steps_run_by

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


def step(folder: Path, ends: str) -> Step:
    outputs = {"outputFile": str(folder / f"step-{ends}" / "executor_output.json")}
    given = json.dumps({"inputs": {"parameterValues": {"ends": ends}}, "outputs": outputs})
    command = ["sh", "-c", "script", CODE, "--executor_input", given, "--function_to_execute", "step"]
    return Step("", command, {"GIVEN": "here"})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_steps_have_their_own_output_environment_and_exit_code(tmp_path: Path, method: str):
    endings = {"well": 0, "raises": 1, "exits": 7, "killed": -9}
    if method == "forkserver":
        import_libraries_once()
    lines: list[str] = []
    codes = [run_process(step(tmp_path, ends), lines.append, method) for ends in endings]
    assert codes == list(endings.values())
    reported = [line.split() for line in lines if line.endswith(tuple("0123456789")) and " here " in line]
    assert len(reported) == len(endings)
    assert {words[0] for words in reported} == {str(method == "forkserver")}
    assert {words[2] for words in reported} == {"true"}
    assert len({words[3] for words in reported} | {str(os.getpid())}) == len(reported) + 1
    assert lines.count("to standard error") == len(endings)
    assert lines[-1] == "the step was ended by SIGKILL"
    assert (tmp_path / "step-well" / "executor_output.json").is_file()
    assert "_KFP_RUNTIME" not in os.environ


def test_what_we_replace_in_kfp_was_read_in_the_version_that_is_installed():
    """After an upgrade: read how kfp/local/task_dispatcher.py makes and runs a handler, and how
    executor_output_utils.py reads the outputs of one that has succeeded; then raise KFP_VERSION."""
    assert kfp.__version__.rpartition(".")[0] == KFP_VERSION


def test_kfp_hands_a_step_to_our_function_and_afterwards_to_its_own(tmp_path: Path):
    @dsl.component(base_image="some/image:1")
    def step(word: str): ...

    seen: list[Step] = []
    before = subprocess_task_handler.SubprocessTaskHandler
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path))
    with steps_run_by(lambda given: seen.append(given) or 1), pytest.raises(RuntimeError, match="FAILURE"):
        step(word="hello")
    (asked,) = seen
    assert (asked.name, asked.image, asked.variables) == ("step", "some/image:1", {})
    words = asked.command
    assert words[0] == "sh"
    assert json.loads(words[words.index("--executor_input") + 1])["inputs"]["parameterValues"] == {"word": "hello"}
    assert subprocess_task_handler.SubprocessTaskHandler is before
