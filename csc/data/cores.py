"""How many CPU cores this process may use."""

import os
from pathlib import Path

__all__ = ["cores"]

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in each period, and the period


def cores() -> int:
    """Cores that this process and its children can use: the allowed ones, limited by the container's CPU quota.

    A container with a CPU limit is still told of every core of its node. Processes beyond its quota would only wait.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    available = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return available
    return max(1, min(available, quota // period))
