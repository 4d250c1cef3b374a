"""`csc ui`: the MLflow pages of a work folder."""

import os
import sys
from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.cli.workdir import tracked_workdir, workdir_argument

__all__ = ["UI"]


def _arguments(parser: ArgumentParser) -> None:
    workdir_argument(parser)
    parser.add_argument("--port", type=int, default=5000)


def _run(arguments: Namespace) -> int:
    uri = tracked_workdir(arguments.workdir)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(arguments.port)]
    print(f"MLflow on http://127.0.0.1:{arguments.port} (stop with Ctrl-C)", flush=True)
    os.execv(sys.executable, [*command, "--backend-store-uri", uri])


UI = Command("open the MLflow pages of a work folder", _arguments, _run)
