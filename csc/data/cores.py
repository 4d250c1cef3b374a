"""How many CPU cores there are for this process."""

import os
from pathlib import Path

__all__ = ["cores"]

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in each period, and the period


def cores() -> int:
    """Cores that this process and its children can keep busy: those they may run on, as far as their quota reaches.

    A container with a CPU limit sees every core of its node; more processes than its quota feeds only wait.
    """
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return available
    return max(1, min(available, quota // period))
