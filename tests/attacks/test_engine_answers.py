"""Attacks by an engine, or by whatever answers at its address: no status of its breaks the caller's connection."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.support.servers import wait_until
from tests.support.wire import CHAT_BODY, STREAM_BODY, connect, get, post, read_answers

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Engine(socketserver.ThreadingTCPServer):
    """Healthy; answers chats with `answer`, as it stands."""

    daemon_threads = True
    answer = b""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    server: Engine

    def handle(self) -> None:
        while line := self.rfile.readline():
            length = 0
            while (field := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = field.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            self.wfile.write(self.server.answer if b"completions" in line else OK)


@pytest.fixture
def database_url():
    """SQLite alone: nothing here depends on the database."""
    return


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        running = threading.Thread(target=server.serve_forever, args=(0.05,))
        running.start()
        yield server
        server.shutdown()
        running.join()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [101, 204, 205, 304, 600, 999])
def test_a_status_that_is_no_answer_to_a_chat_is_an_engine_lost(engine, start_explorer, status, stream):
    explorer = start_explorer([engine.url]).wait_ready()
    engine.answer = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n\r\n" % status
    with connect(explorer, post("/chat", STREAM_BODY if stream else CHAT_BODY)) as opened:
        opened.sendall(get("/health"))
        chat, health = read_answers(opened, 2)
    assert (chat.status, health.status) == (503, 200)
    assert b"engine_lost" in chat.body


def test_an_early_hint_is_not_the_answer(engine, start_explorer):
    explorer = start_explorer([engine.url]).wait_ready()
    refusal = b'{"error": {}}'
    engine.answer = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 400 Bad Request\r\n"
    engine.answer += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(refusal) + refusal
    with connect(explorer, post("/chat", CHAT_BODY) + get("/health")) as opened:
        chat, health = read_answers(opened, 2)
    assert (chat.status, chat.body, health.status) == (400, refusal, 200)
    wait_until(lambda: explorer.deps.pool.engines[0].in_flight == 0)
