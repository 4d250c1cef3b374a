"""`csc serve`: a registered model behind HTTP; `csc.serving.service` says what it answers."""

import re
import signal
import socket
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from csc.cli.command import Command
from csc.cli.predict import load_predictor
from csc.cli.workdir import workdir_argument
from csc.errors import BadConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from csc.serving.predictor import Predictor

__all__ = ["SERVE", "listening"]

STOP_SECONDS = 30  # for requests under way when the server is told to stop


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="models:/NAME@ALIAS, models:/NAME/VERSION or a model folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on; 0 for a free one (default: 8080)")
    parser.add_argument("--name", help="name of the model in addresses (default: its name in the registry)")
    workdir_argument(parser)


def _serve(arguments: Namespace) -> int:
    import numpy as np
    import starlette  # noqa: F401 - before the port is taken and the model fetched
    import uvicorn  # noqa: F401

    with listening(arguments.host, arguments.port) as listener:
        predictor = load_predictor(arguments.model, arguments.workdir)
        predictor.confidences([np.zeros((predictor.size, predictor.size, 3), np.uint8)])  # the first is the slowest
        name = arguments.name or _name(arguments.model, predictor)
        from csc.serving.service import application

        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"{name}, {len(predictor.card.classes)} classes, on {address} (stop with Ctrl-C)", flush=True)
        _run(application(name, predictor), listener)
    return 0


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; the first to find out, before the model is fetched, that a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0]
        raise BadConfig(f"cannot listen on {host}, port {port} ({reason}); choose another address or port") from None


def _name(model: str, predictor: "Predictor") -> str:
    """The name in the registry; a folder does not have one, but tells how it would be registered."""
    if registered := re.fullmatch(r"models:/([^/@]+)[/@].+", model):
        return registered[1]
    from csc.tracking.names import model_name

    return model_name(predictor.card.scenario, predictor.card.method)


def _run(app: "Starlette", listener: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C; requests under way are finished first."""
    import uvicorn

    # Uvicorn sends itself the signal again once it has stopped, although that is all the signal asked for.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=STOP_SECONDS
    )
    uvicorn.Server(config).run(sockets=[listener])


SERVE = Command("answer HTTP requests with a registered model", _serve, _arguments)
