"""What a subcommand of `csc` is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One word after `csc`: a line of help, what does the work and returns the exit code, and its arguments."""

    help: str
    run: Callable[[Namespace], int]
    arguments: Callable[[ArgumentParser], None] = lambda parser: None
