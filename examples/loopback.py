"""HTTP server on this machine's loopback interface for the pages of an example."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from shared.config import is_loopback


class Pages(BaseHTTPRequestHandler):
    """Base class of the examples' request handlers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds

    def parse_request(self) -> bool:
        """Read the head of a request. Refuse a request that another site's page makes a browser send."""
        if not super().parse_request():
            return False
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_ours = is_loopback(urlsplit(f"//{host}").hostname or "")  # not a foreign name that resolves here
        if self.command == "POST":
            is_ours = is_ours and origin in (None, f"http://{host}")
            is_ours = is_ours and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if not is_ours:
            self.close_connection = True
            self.send(HTTPStatus.FORBIDDEN, "a web page of another site may not use this one", "text/plain")
        return is_ours

    def read_body(self, longest: int) -> bytes | None:
        """Return the request's body, or None if it is too long or its length is unknown; this closes the connection."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > longest:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def send(self, status: int, text: str, kind: str = "text/html", headers: Mapping[str, str] | None = None) -> None:
        """Send the response."""
        body = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: successful requests need no record."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # backlog of connections; socketserver's default of 5 loses some in a burst of runs


@contextlib.contextmanager
def listening(handler: type[Pages], port: int = 0) -> Iterator[str]:
    """Serve while the block runs. Yields the URL. port: 0 selects a free one."""
    server = _Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
