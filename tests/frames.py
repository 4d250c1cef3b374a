"""A quicker `inspect.stack`: for every setting of a step kfp asks who calls it."""

import inspect
import sys


def callers(context: int = 0) -> list[inspect.FrameInfo]:
    """What `inspect.stack` returns, without the source: to find it, every loaded module would be looked at."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found
