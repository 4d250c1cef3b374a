"""Text that others wrote, made safe to print: without control characters."""

import re

__all__ = ["printable", "printable_line", "single_line"]

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?")


def printable(text: str) -> str:
    """Replace control characters and others that XML does not allow; the length stays.

    >>> printable("a" + chr(27) + "b")
    'a�b'
    """
    return _replaced(text, "�")


def single_line(text: str) -> str:
    r"""A message of many lines as one: without escape sequences, control characters and invisible ones.

    >>> single_line("\x1b[31mno\x1b[0m such\x07\n  pod")
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
    return _replaced(_ESCAPES.sub("", text), " ")


def _replaced(text: str, substitute: str) -> str:
    return "".join(character if character.isprintable() else substitute for character in text)
