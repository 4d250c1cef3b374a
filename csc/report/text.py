"""Text that others wrote, made safe to print."""

__all__ = ["printable"]


def printable(text: str) -> str:
    """Replace characters that a terminal would obey or XML does not allow.

    >>> printable("a" + chr(27) + "b")
    'a�b'
    """
    return "".join(character if character.isprintable() else "�" for character in text)
