"""Pages of an example over HTTP, on this machine's loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from shared.config import is_loopback


class Pages(BaseHTTPRequestHandler):
    """Base of an example's handlers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60  # seconds

    def parse_request(self) -> bool:
        """A request's head. What a page of another site makes a browser send is refused: it must not rate or act."""
        if not super().parse_request():
            return False
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_ours = is_loopback(urlsplit(f"//{host}").hostname or "")  # or else a page's own name leads here
        if self.command == "POST":
            is_ours = is_ours and origin in (None, f"http://{host}")
            is_ours = is_ours and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        if not is_ours:
            self.close_connection = True
            self.send(HTTPStatus.FORBIDDEN, "a web page of another site may not use this one", "text/plain")
        return is_ours

    def read_body(self, longest: int) -> bytes | None:
        """The request's body; None when it is longer, or its length is not said: the connection then ends."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > longest:
            self.close_connection = True
            return None
        return self.rfile.read(int(length))

    def send(self, status: int, text: str, kind: str = "text/html", headers: Mapping[str, str] | None = None) -> None:
        """Answer the request."""
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
        """Nothing: a call is no news."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait; of socketserver's five a burst of runs loses some


@contextlib.contextmanager
def listening(handler: type[Pages], port: int = 0) -> Iterator[str]:
    """Serve while the block runs; gives the URL. port: 0 takes a free one."""
    server = _Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
