"""Servers that answer with something else than they should: one line, exit code 2, and no file changed.

A recipe of `answers.yaml` has the answers of a server, by what their paths begin with, and a command that asks it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from csc.pipelines import scenario
from tests.bad_input.recipes import check_line, parameters, recipes
from tests.bad_input.test_commands import cwd, typed_line
from tests.cluster import compile_once

__all__ = ["cwd"]  # a fixture

RECIPES = recipes("answers")
JSON = "application/json"


@contextmanager
def answering(answers: dict[str, list[Any]]) -> Iterator[str]:
    """A server that answers each path with [status, body, kind] of the longest beginning that fits; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            begin = max((path for path in answers if self.path.startswith(path)), key=len, default="")
            status, body, kind = [*answers.get(begin, [404, "{}"]), JSON][:3]
            text = body["nested"] * "[" if isinstance(body, dict) else body
            content = text.encode("utf-8", "surrogateescape")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) + (99 if kind == "broken" else 0)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("recipe", parameters(RECIPES))
def test_an_answer_of_another_form_gives_the_one_line_of_its_recipe(
    recipe: dict[str, Any], cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scenario, "compile_pipeline", compile_once)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # which would wait for minutes
    with answering(recipe["answers"]) as host:
        if recipe["type"].split()[0] in ("show", "extend", "predict", "study"):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", host)
        asked = recipe | {"type": recipe["type"].replace("{host}", host)}
        line = typed_line(asked, cwd, capsys)
    check_line(recipe, line.replace(host, "{host}"))
