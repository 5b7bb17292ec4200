"""An outside witness of writes: a server that counts refunds, in a thread of its own."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Witness:
    """Counts what was really done: POST /refund/WHO by whom."""

    def __init__(self) -> None:
        self.refunds: Counter[str] = Counter()
        lock = threading.Lock()
        witness = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    witness.refunds[self.path.rpartition("/")[2]] += 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def refund(self, who: str) -> str:
        """What a writing tool does."""
        connection = http.client.HTTPConnection(*self.server.server_address[:2], timeout=60)  # type: ignore[arg-type]
        connection.request("POST", f"/refund/{who}")
        assert connection.getresponse().status == 200
        connection.close()
        return "refunded"


@contextmanager
def witnessing() -> Iterator[Witness]:
    witness = Witness()
    thread = threading.Thread(target=witness.server.serve_forever, args=(0.02,))
    thread.start()
    yield witness
    witness.server.shutdown()
    thread.join()
    witness.server.server_close()
