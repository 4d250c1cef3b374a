"""`csc methods`: list the learning methods."""

from argparse import Namespace

from csc.cli.command import Command, no_arguments
from csc.config import methods

__all__ = ["METHODS"]


def _run(arguments: Namespace) -> int:
    del arguments
    for name, description in methods().items():
        print(f"{name:<10}{description}")
    return 0


METHODS = Command("list the learning methods", no_arguments, _run)
