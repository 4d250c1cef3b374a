"""A step of a run on this machine, and how kfp.local is made to hand it to us.

kfp.local starts a step with a class for processes or one for containers, and takes no other. While a run lasts, the
class for processes is ours: it gives the step to a function, which finds its outputs in the cache or runs it, in a
process or in a container. Nothing else of kfp is replaced.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp.local import subprocess_task_handler
from kfp.local.status import Status

__all__ = ["GRACE_SECONDS", "KFP_VERSION", "RunStep", "Show", "Step", "steps_run_by"]

KFP_VERSION = "2.17"  # whose kfp/local/task_dispatcher.py this fits; tests/pipelines/test_processes.py checks it
GRACE_SECONDS = 30  # that a step has to save its work when it is told to end; Kubernetes gives as many


@dataclass(frozen=True)
class Step:
    """What kfp.local asks to run: `sh -c SCRIPT CODE --executor_input …`, and variables on top of our own."""

    image: str
    command: list[str]
    variables: Mapping[str, str]

    @functools.cached_property
    def executor_input(self) -> dict[str, Any]:
        """What the step is given: values, input artifacts, and where outputs go."""
        found: dict[str, Any] = json.loads(self.command[self._input_position])
        return found

    @property
    def command_without_input(self) -> list[str]:
        """What is the same whatever the step is given."""
        return [*self.command[: self._input_position], *self.command[self._input_position + 1 :]]

    @property
    def output_file(self) -> Path:
        """Where the step lists its outputs for kfp."""
        return Path(self.executor_input["outputs"]["outputFile"])

    @property
    def name(self) -> str:
        """As kfp.local calls it: it names the folder of the outputs after the component."""
        return self.output_file.parent.name

    @property
    def _input_position(self) -> int:
        return self.command.index("--executor_input") + 1


Show = Callable[[str], None]  # takes a line that a step has printed
RunStep = Callable[[Step, Show], int]  # runs a step to its end and returns its exit code


@contextlib.contextmanager
def steps_run_by(run: Callable[[Step], int]) -> Iterator[None]:
    """Have kfp.local run every step with a function, for as long as the block lasts."""

    class Handler:  # what kfp.local.task_handler_interface asks for
        def __init__(
            self,
            image: str,
            full_command: list[str],
            pipeline_root: str,
            runner: Any,
            env_vars: dict[str, str] | None = None,
        ) -> None:
            self.step = Step(image, full_command, env_vars or {})

        def run(self) -> Status:
            return Status.SUCCESS if run(self.step) == 0 else Status.FAILURE

    original = subprocess_task_handler.SubprocessTaskHandler
    subprocess_task_handler.SubprocessTaskHandler = Handler
    try:
        yield
    finally:
        subprocess_task_handler.SubprocessTaskHandler = original
