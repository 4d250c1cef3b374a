"""How memory is kept between the steps of a training on a CPU."""

import ctypes
import sys

__all__ = ["keep_memory"]

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_memory() -> None:
    """Have the memory that this process frees stay with it, for its next step.

    A step frees gigabytes and asks for them again. glibc gives large pieces back to the system at once, which then has
    to clear every page of them: up to a quarter of the time of a step. Where there is no glibc, nothing happens.
    """
    if sys.platform != "linux":
        return
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_MMAP_MAX, 0)  # nothing is mapped for itself
        tune(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
