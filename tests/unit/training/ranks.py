"""What single ranks of a launch do; in a module of its own, because each rank imports the module that it works for."""

import os
import signal

from csc.distributed.group import join_group
from csc.errors import BadData


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
