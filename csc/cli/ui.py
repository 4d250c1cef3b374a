"""`csc ui`: the MLflow pages of a work folder, with saved pages on our runs."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from csc.cli.command import Command
from csc.cli.serve import listening
from csc.cli.workdir import tracked_workdir, workdir_argument
from csc.errors import TrackingError
from csc.report.text import single_line
from csc.tracking.queries import add_saved_pages
from csc.tracking.saved_pages import page_path
from csc.tracking.server import without_secrets

__all__ = ["UI"]


def _arguments(parser: ArgumentParser) -> None:
    workdir_argument(parser)
    parser.add_argument("--port", type=int, default=5000, help="of this machine; 0 for a free one (default: 5000)")


def _run(arguments: Namespace) -> int:
    uri = tracked_workdir(arguments.workdir)
    if uri.startswith(("http://", "https://")):  # its pages are there already
        _print_pages(without_secrets(uri).rstrip("/"), add_saved_pages())
        return 0
    with listening("127.0.0.1", arguments.port) as listener:  # says in one line if the port is taken
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--uvicorn-opts", "--log-level warning"]  # a line per request would push the addresses out of sight
    # Without the processes that evaluate language models, and without warnings of libraries.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore", **os.environ}
    with subprocess.Popen([*command, "--workers", "1", "--backend-store-uri", uri], env=environment) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            experiments = add_saved_pages()  # while the server starts
            _wait_for(address, server)
            _print_pages(address, experiments)
            print(f"MLflow on {address} (stop with Ctrl-C)", flush=True)
            return server.wait()
        except KeyboardInterrupt:  # Ctrl-C has reached the server too
            return server.wait()


def _print_pages(address: str, experiments: Mapping[str, str]) -> None:
    for name, experiment in experiments.items():
        for page in ("results", "curves"):
            print(f"{single_line(name)} {page:<8} {address}{page_path(experiment, page)}", flush=True)


def _wait_for(address: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TrackingError(f"the MLflow server on {address} ended with exit code {server.returncode}, see above")


UI = Command("open the MLflow pages of a work folder", _run, _arguments)
