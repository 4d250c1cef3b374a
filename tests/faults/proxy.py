"""A proxy in front of a server, which treats bursts of requests badly and passes all others on."""

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

HANG_SECONDS = 6.0
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}  # headers that concern one connection


@dataclass
class Bursts:
    """Which requests are treated badly: some in a row, then many not, in numbers that the seed chooses."""

    rng: Random
    longest: int = 5
    left: int = 0
    until: int = 4
    spoilt: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self) -> bool:
        """Whether the next request is one of them."""
        with self.lock:
            if self.left == 0 and self.until > 0:
                self.until -= 1
                return False
            if self.left == 0:
                self.left, self.until = self.rng.randint(1, self.longest), self.rng.randint(5, 40)
            self.left -= 1
            self.spoilt += 1
            return True


def body_of(request: http.server.BaseHTTPRequestHandler) -> bytes:
    """Read the body of a request, whole or in chunks."""
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    chunks = []
    while size := int(request.rfile.readline(), 16):
        chunks.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(chunks)


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes a request on, unless it is one of a burst."""

    target: str
    mode: str
    bursts: Bursts
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        if self.bursts.hit():
            return getattr(self, f"_{self.mode}")()
        return self._answer(self._forward(body_of(self)))

    def _answer(self, answer: Any, part: float = 1.0) -> None:
        """Hand on an answer, or the beginning of one."""
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content[: int(part * len(content))])

    def _forward(self, body: bytes, sent: int | None = None) -> Any:
        """Send a request, or the beginning of one, with the headers it came with: they are signed."""
        address = urlsplit(self.target)
        server = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP | {"expect"}:
                server.putheader(name, value)
        server.putheader("Content-Length", str(len(body)))
        server.endheaders(body[:sent])
        if sent is not None:
            server.close()
            return None
        return server.getresponse()

    def _refuses(self) -> None:
        """Reset the connection, before anything is read."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _hangs(self) -> None:
        """Take the request and never answer."""
        body_of(self)
        time.sleep(HANG_SECONDS)
        self.close_connection = True

    def _cuts(self) -> None:
        """Hand on the first half of an upload, or of a download, then close both connections."""
        body = body_of(self)
        if body:
            with contextlib.suppress(OSError):
                self._forward(body, len(body) // 2)
        else:
            self._answer(self._forward(body), part=0.5)
        self.close_connection = True

    def _loses(self) -> None:
        """Have the request done, and tell nobody."""
        self._forward(body_of(self)).read()
        self.close_connection = True

    def _fails(self) -> None:
        """Answer that there is too much to do."""
        body_of(self)
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # whoever called has gone
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


MODES = ("refuses", "hangs", "cuts", "loses", "fails")


@contextlib.contextmanager
def proxied(target: str, mode: str, rng: Random) -> Iterator[tuple[str, Bursts]]:
    """The address of a proxy in front of a server, and how many requests it has spoilt."""
    bursts = Bursts(rng, longest=2 if mode == "hangs" else 5)
    handler = type("Handler", (Handler,), {"target": target, "mode": mode, "bursts": bursts})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}", bursts
        finally:
            proxy.shutdown()
