"""How kfp.local starts a step: the one part of kfp that is replaced.

kfp.local starts a step with a class for processes or one for containers, and takes no other. While a run lasts, the
class for processes is ours. It hands the step to a function, which forks it or runs it in a container.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kfp.local import subprocess_task_handler
from kfp.local.status import Status

__all__ = ["KFP_VERSION", "Start", "steps_started_by"]

KFP_VERSION = "2.17"  # in which kfp/local/task_dispatcher.py was read; tests/pipelines/test_forked.py checks it

Start = Callable[[str, Sequence[str], Mapping[str, str]], int]  # image, command and variables to exit code


@contextlib.contextmanager
def steps_started_by(start: Start) -> Iterator[None]:
    """Have kfp.local start every step with a function, for as long as the block lasts."""

    class Handler:  # what kfp.local.task_handler_interface asks for
        def __init__(
            self,
            image: str,
            full_command: list[str],
            pipeline_root: str,
            runner: Any,
            env_vars: dict[str, str] | None = None,
        ) -> None:
            self.step = image, full_command, env_vars or {}

        def run(self) -> Status:
            return Status.SUCCESS if start(*self.step) == 0 else Status.FAILURE

    original = subprocess_task_handler.SubprocessTaskHandler
    subprocess_task_handler.SubprocessTaskHandler = Handler
    try:
        yield
    finally:
        subprocess_task_handler.SubprocessTaskHandler = original
