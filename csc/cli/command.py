"""What a subcommand of `csc` is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One word after `csc`: a line of help, its arguments, and what does the work and returns the exit code."""

    help: str
    arguments: Callable[[ArgumentParser], None] = lambda parser: None
    run: Callable[[Namespace], int] = lambda arguments: 0
