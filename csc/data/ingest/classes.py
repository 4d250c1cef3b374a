"""The names of classes, and the order in which they arrive."""

import os
from collections.abc import Iterable, Sequence

from csc.errors import BadData
from csc.storage import read_bytes

__all__ = ["check_class_names", "in_order", "read_class_order"]

LONGEST = 250  # characters


def check_class_names(names: Iterable[str]) -> None:
    """Refuse a name that a later step could not carry: a column, a metric, a line of a report."""
    for name in names:
        if not name or name != name.strip() or not name.isprintable() or len(name) > LONGEST:
            shown = name if len(name) <= LONGEST else f"{name[:20]}…"
            raise BadData(
                f"class {shown!r}: expected a name of 1 to {LONGEST} characters, in one line, without spaces around it"
            )


def read_class_order(uri: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read the order in which classes arrive: a text file with one name per line."""
    try:
        lines = read_bytes(uri).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadData(f"{uri}: not a text file ({error}); expected one class per line") from None
    return tuple(line.strip() for line in lines if line.strip())


def in_order(classes: Iterable[str], order: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in the given order, which must name each of them once; without one, in that of their names."""
    known = tuple(sorted(classes))
    if order is None:
        return known
    twice = sorted({name for name in order if order.count(name) > 1})
    for what, names in (
        ("lists twice", twice),
        ("lacks", sorted(set(known) - set(order))),
        ("names unknown classes", sorted(set(order) - set(known))),
    ):
        if names:
            raise BadData(f"class order {what}: {', '.join(names[:5])}; expected each of the {len(known)} classes once")
    return tuple(order)
