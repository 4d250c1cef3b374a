"""Text for a terminal: without characters that could change it, and times as people say them."""

import re

__all__ = ["duration", "printable", "printable_line"]

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?")


def printable(text: str) -> str:
    r"""What a server says, in one line: without escape sequences, control characters and invisible ones.

    >>> printable("\x1b[31mno\x1b[0m such\x07\n  pod")
    'no such pod'
    """
    return " ".join(_plain(text).split())


def printable_line(line: str) -> str:
    r"""A line of a log as a terminal would leave it: what a carriage return overwrote is gone, and columns stay.

    >>> printable_line("  1 %\r  2 %\x1b[0m\r")
    '  2 %'
    """
    return _plain(line.rstrip("\r").rpartition("\r")[2].expandtabs()).rstrip()


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in _ESCAPES.sub("", text))


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(42), duration(3720), duration(9000)
    ('42 s', '62 min', '2 h 30 min')
    """
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
