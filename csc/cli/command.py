"""What a subcommand of `csc` is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command", "no_arguments"]


@dataclass(frozen=True)
class Command:
    """One word after `csc`.

    Attributes:
        help: one line for the list of commands.
        arguments: declares the command's arguments.
        run: does the work and returns the exit code.
    """

    help: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def no_arguments(parser: ArgumentParser) -> None:
    """Declare nothing: for a command without arguments."""
    del parser
