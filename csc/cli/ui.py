"""`csc ui`: the MLflow pages of a work folder, opened on views of our runs."""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace

from csc.cli.command import Command
from csc.cli.workdir import tracked_workdir, workdir_argument
from csc.errors import BadConfig, TrackingError

__all__ = ["UI"]

STARTUP_SECONDS = 180


def _arguments(parser: ArgumentParser) -> None:
    workdir_argument(parser)
    parser.add_argument("--port", type=int, default=5000, help="port to listen on (default: 5000)")


def _run(arguments: Namespace) -> int:
    uri = tracked_workdir(arguments.workdir)
    if uri.startswith(("http://", "https://")):  # its pages are there already
        _print_views(uri.rstrip("/"))
        return 0
    _check_free(arguments.port)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(arguments.port)]
    address = f"http://127.0.0.1:{arguments.port}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with us, however we are told to stop
    with subprocess.Popen([*command, "--workers", "1", "--backend-store-uri", uri]) as server:
        try:
            _wait(address, server)
            _print_views(address)
            print("stop with Ctrl-C", flush=True)
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()


def _check_free(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0]
        raise BadConfig(f"cannot listen on 127.0.0.1, port {port} ({reason}); give another --port") from None


def _wait(address: str, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.3)
    raise TrackingError(f"MLflow on {address} did not start; its lines above say why")


def _print_views(address: str) -> None:
    from csc.tracking.queries import with_views
    from csc.tracking.views import view_path

    print(f"MLflow    {address}")
    for name, experiment in with_views().items():
        for view in ("results", "curves"):
            print(f"{name:<9} {view:<8} {address}{view_path(experiment, view)}", flush=True)


UI = Command("open the MLflow pages of a work folder", _arguments, _run)
