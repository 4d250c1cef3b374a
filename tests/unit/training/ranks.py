"""Ranks of a launch that are forks of this process, and what single ranks do.

To start Python and import torch and timm takes six seconds of processor time for each rank; a fork has them. All else
of a launch is torchrun's: its agent, where ranks meet, how their ends are reported. `test_distributed.py` also has
launches of real commands.
"""

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.launcher import api

from csc.distributed import launch
from csc.distributed.group import join_group
from csc.errors import BadData


def _be_rank(*words: str) -> None:
    """Do what `python -m csc.distributed.launch TARGET FILE [LAUNCHER]` does; torchrun's command does not name it."""
    for number in launch.STOPS:
        signal.signal(number, signal.SIG_DFL)  # a fork has the handlers of its launcher, a command has not
    target, file, *launcher = words[words.index(launch.__name__) + 1 :]
    code = launch.main(target, Path(file), *map(int, launcher))
    if code:
        sys.exit(code)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Let launches in the block fork their ranks instead of starting Python for each."""
    elastic_launch = api.elastic_launch

    def launch_forks(config: api.LaunchConfig, entrypoint: str) -> Callable[..., Any]:
        return elastic_launch(dataclasses.replace(config, start_method="fork"), _be_rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "elastic_launch", launch_forks)
        patch.setattr(torchrun, "elastic_launch", launch_forks)
        yield


def refused_by_one(path: str) -> None:
    """The second process refuses its input while the first waits for it."""
    with join_group() as group:
        if not group.is_main:
            raise BadData(f"{path}: no such file")
        group.agree(1)


def dies_in_one(how: str) -> None:
    """The second process dies while the first waits for it."""
    with join_group() as group:
        if not group.is_main:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(7)
        group.agree(1)
