"""Attacks by an engine, or by whatever answers at its address: none breaks the caller's connection or fills memory."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from explorer_service.engines import admin
from tests.support.postgres import sqlite_alone
from tests.support.servers import publish, wait_until
from tests.support.wire import CHAT_BODY, STREAM_BODY, connect, get, post, read_answers


def ok(body: bytes, kind: bytes = b"application/json") -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body)) + body


OK = ok(b"{}")
NO_JSON = [b'{"id": "\xff", "data": [{"id": "\xff"}]}', b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"id']


class Engine(socketserver.ThreadingTCPServer):
    """Healthy; answers chats with `answer`, as it stands."""

    daemon_threads = True
    answer = b""
    health = OK
    administration = OK
    repeat = b""  # sent on and on behind an answer
    pause_s = 0.0  # between the repetitions
    chats = 0  # connections that had one

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    server: Engine

    def handle(self) -> None:
        has_chatted = False
        while line := self.rfile.readline():
            length = 0
            while (field := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = field.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            is_chat, is_health = b"completions" in line, b"/health" in line
            self.server.chats += is_chat and not has_chatted
            has_chatted |= is_chat
            other = self.server.health if is_health else self.server.administration
            self.wfile.write(self.server.answer if is_chat else other)
            while self.server.repeat and (is_chat or (is_health and self.server.health is not OK)):
                self.wfile.write(self.server.repeat)
                time.sleep(self.server.pause_s)


database_url = sqlite_alone  # nothing here depends on the database


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


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_end_is_refused_at_its_limit_and_the_engine_serves_on(engine, start_explorer, stream):
    explorer = start_explorer([engine.url], max_reply_bytes=1_000_000).wait_ready()
    engine.answer, engine.repeat = CHUNKED % (b"text/event-stream" if stream else b"application/json"), CHUNK
    reply = explorer.chat(stream=stream)
    assert reply.status_code == (200 if stream else 503)
    assert "larger than 1000000 bytes (explorer.max_reply_bytes)" in reply.text
    assert "[DONE]" not in reply.text
    assert explorer.deps.pool.engines[0].is_open
    wait_until(lambda: explorer.deps.pool.engines[0].in_flight == 0)


def test_an_announced_size_beyond_the_limit_is_refused_by_its_head(engine, start_explorer):
    explorer = start_explorer([engine.url]).wait_ready()
    engine.answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
    reply = explorer.chat()
    assert reply.status_code == 503
    assert "reply of 999999999999 bytes is larger than 134217728 bytes" in reply.text


def test_an_engine_that_drips_its_health_is_given_up_in_time(engine, start_explorer, monkeypatch):
    monkeypatch.setattr(admin, "HEALTH_TIMEOUT_S", 0.5)
    explorer = start_explorer([engine.url]).wait_ready()
    engine.repeat, engine.pause_s, engine.health = b"1\r\n \r\n", 0.05, CHUNKED % b"application/json"
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    engine.health, engine.repeat = OK, b""
    explorer.wait_ready()


def test_an_engine_whose_health_does_not_end_is_away(engine, start_explorer, monkeypatch):
    monkeypatch.setattr(admin, "MAX_ANSWER_BYTES", 1_000_000)
    explorer = start_explorer([engine.url]).wait_ready()
    engine.repeat, engine.health = CHUNK, CHUNKED % b"application/json"
    wait_until(lambda: "answered more than 1000000 bytes" in explorer.deps.pool.engines[0].reason)
    assert explorer.http.get("/ready").status_code == 503
    engine.health, engine.repeat = OK, b""
    explorer.wait_ready()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", NO_JSON, ids=["no UTF-8", "deep", "cut off"])
def test_a_reply_whose_bytes_are_no_json_is_the_engines_fault_and_never_a_500(engine, start_explorer, body, stream):
    explorer = start_explorer([engine.url]).wait_ready()
    engine.answer = ok(b"data: " + body + b"\n\n", b"text/event-stream") if stream else ok(body)
    for stored in (True, False):
        reply = explorer.chat(stream=stream, store=stored)
        assert reply.status_code == (200 if stream else 503)
        assert '"code":"engine_reply"' in reply.text


@pytest.mark.parametrize("body", NO_JSON, ids=["no UTF-8", "deep", "cut off"])
def test_administration_whose_bytes_are_no_json_ends_no_explorer(engine, start_explorer, caplog, body):
    explorer = start_explorer([engine.url]).wait_ready()
    engine.administration = ok(body)
    for version in (0, 1):
        publish(explorer, version)
    wait_until(lambda: explorer.background.failed is not None or "that is not JSON" in caplog.text)
    assert explorer.background.failed is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_brought_the_answer_to_another_request_is_thrown_away(engine, start_explorer, stream):
    explorer = start_explorer([engine.url]).wait_ready()
    body = b'{"id":"chatcmpl-of-another","choices":[{"index":0,"delta":{},"message":{}}]}'
    engine.answer = ok(b"data: " + body + b"\n\ndata: [DONE]\n\n", b"text/event-stream") if stream else ok(body)
    for chats in (1, 2):
        assert "answered 'chatcmpl-of-another'" in explorer.chat(stream=stream).text
        assert engine.chats == chats
