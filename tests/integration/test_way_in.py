"""The way of a request: every route through one application, errors into answers, callers who leave."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from explorer_service.api.protocol import ExplorerProtocol
from explorer_service.app import ROUTES, Endpoint
from explorer_service.errors import EngineLost
from shared.errors import LedgerError
from tests.support.postgres import sqlite_alone
from tests.support.servers import RunningExplorer, wait_until

CHAT_BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'


database_url = sqlite_alone  # nothing here depends on the database


def request(path: str, body: bytes, *fields: str) -> bytes:
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *fields])
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def connect(explorer: RunningExplorer) -> socket.socket:
    url = explorer.http.base_url
    return socket.create_connection((url.host, url.port), timeout=120)


def read_answers(opened: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of so many plain answers."""
    data, answers = b"", []
    while len(answers) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if end and len(rest) >= length:
            answers.append((int(head[9:12]), rest[:length]))
            data = rest[length:]
            continue
        part = opened.recv(1 << 16)
        assert part, data
        data += part
    return answers


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions", "/v1/chat/completions?x=1", "/v1/chat%2Fcompletions", "/chat"]
)
def test_a_path_may_be_written_in_many_ways(explorer, target):
    with connect(explorer) as opened:
        opened.sendall(request(target, CHAT_BODY))
        ((status, _),) = read_answers(opened, 1)
    assert status == 200


def test_another_method_is_told_which_one_is_right(explorer):
    for method, path, _ in ROUTES:
        reply = explorer.http.request("PATCH", path.replace("{version}", "1"))
        assert (reply.status_code, reply.headers["allow"].split(", ")[0] != "") == (405, True)
        assert method in reply.headers["allow"]
        assert reply.json()["error"]["code"] is None


@pytest.mark.parametrize("path", ["/chat/completions", "/run/t/r/chat/completions", "/models", "/nothing"])
def test_a_base_url_without_v1_is_named(explorer, path):
    message = explorer.http.get(path).json()["error"]["message"]
    assert ("/v1" in message) == (path != "/nothing")


def test_middleware_sees_every_request(explorer, monkeypatch):
    seen: list[str] = []
    stack = explorer.app.middleware_stack

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await stack(scope, receive, send)

    monkeypatch.setattr(explorer.app, "middleware_stack", middleware)
    explorer.chat()
    explorer.http.post("/v1/chat/completions", json={"messages": [], "stream": True})
    explorer.http.post("/feedback", json={})
    assert seen == ["/v1/chat/completions", "/v1/chat/completions", "/feedback"]


OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAA")


@pytest.mark.parametrize("parts", [1, 2], ids=["at once", "after its head"])
def test_the_offer_of_http2_is_passed_over(explorer, parts):
    """Java's HTTP client makes it with its first request."""
    data = request("/chat", CHAT_BODY, *OFFER)
    cut = len(data) if parts == 1 else data.index(b"\r\n\r\n") + 4
    with connect(explorer) as opened:
        opened.sendall(data[:cut])
        opened.sendall(data[cut:])
        opened.sendall(request("/chat", CHAT_BODY))
        assert [status for status, _ in read_answers(opened, 2)] == [200, 200]


@pytest.mark.parametrize("parts", [1, 2], ids=["at once", "after its head"])
def test_a_body_that_reads_like_the_offer_is_left_alone(explorer, scripted_engine, parts):
    body = b'{"messages": [], "note": "POST \\r\\nUpgrade: h2c\\r\\n\\r\\n", "h2c": 1}\r\nUpgrade: h2c\r\n\r\n'
    data = request("/chat", body)
    cut = len(data) if parts == 1 else data.index(b"\r\n\r\n") + 4
    with connect(explorer) as opened:
        opened.sendall(data[:cut])
        opened.sendall(data[cut:])
        ((status, answer),) = read_answers(opened, 1)
    assert status == 400, "what follows the object is part of the body"
    assert b"trailing characters" in answer


def test_requests_sent_at_once_are_answered_in_order(explorer, scripted_engine):
    bodies = [b'{"messages": [], "user": "%d"}' % number for number in range(5)]
    with connect(explorer) as opened:
        opened.sendall(b"".join(request("/chat", body) for body in bodies))
        assert [status for status, _ in read_answers(opened, 5)] == [200] * 5
    assert [body["user"] for body in scripted_engine.script.bodies] == list("01234")


def test_who_asks_whether_to_go_on_is_told_so(explorer):
    data = request("/chat", CHAT_BODY, "Expect: 100-continue")
    head_end = data.index(b"\r\n\r\n") + 4
    with connect(explorer) as opened:
        opened.sendall(data[:head_end])
        assert opened.recv(4096).startswith(b"HTTP/1.1 100 Continue\r\n")
        opened.sendall(data[head_end:])
        assert read_answers(opened, 1)[0][0] == 200


def test_a_body_that_is_too_long_is_refused_before_it_is_there(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_body_bytes=1000).wait_ready()
    data = request("/chat", bytes(100_000_000))
    with connect(explorer) as opened:
        opened.sendall(data[:5000])
        ((status, answer),) = read_answers(opened, 1)
    assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("spoken", ["Connection: close", "Connection: TE, close", "HTTP/1.0"])
def test_who_sends_all_of_a_body_before_it_reads_is_told_why_it_is_refused(spoken, scripted_engine, start_explorer):
    """Its connection ends with the answer: with bytes of it unread there, the answer would be lost with them."""
    explorer = start_explorer([scripted_engine.url], max_body_bytes=1000).wait_ready()
    for path, expected in (("/chat", 413), ("/health", 405)):
        data = request(path, bytes(20_000_000), *(() if spoken == "HTTP/1.0" else (spoken,)))
        with connect(explorer) as opened:
            opened.sendall(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1) if spoken == "HTTP/1.0" else data)
            assert read_answers(opened, 1)[0][0] == expected
            assert opened.recv(1) == b"", "the connection has ended"


def test_who_asks_whether_to_go_on_and_is_refused_sends_no_body(explorer):
    data = request("/health", bytes(1000), "Expect: 100-continue", "Connection: close")
    with connect(explorer) as opened:
        opened.sendall(data[:-1000])
        assert read_answers(opened, 1)[0][0] == 405


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_ends_the_work(explorer, scripted_engine, stream):
    script = scripted_engine.script
    script.chats_wait, script.streams_wait, script.gap_s = True, True, 0.05  # the reply is never complete
    script.reply_ids, script.logprobs = list(range(11, 1011)), [-0.5] * 1000
    opened = connect(explorer)
    opened.sendall(request("/chat", b'{"messages": [], "stream": %s}' % (b"true" if stream else b"false")))
    wait_until(lambda: script.events > 1 if stream else len(script.bodies) == 1)
    opened.close()
    (engine,) = explorer.deps.pool.engines
    wait_until(lambda: engine.in_flight == 0)
    assert explorer.http.get("/status").json()["rows"]["RECORDED"] == 0
    assert 'flywheel_chat_requests_total{status="499"} 1.0' in explorer.http.get("/metrics").text
    script.chats_wait = False
    assert explorer.chat().status_code == 200


def test_a_caller_who_leaves_while_it_waits_for_an_engine_gives_its_place_up(scripted_engine, start_explorer):
    limits = {"max_in_flight": 1, "max_waiting": 1, "engine_wait_s": 600.0}
    explorer = start_explorer([scripted_engine.url], **limits).wait_ready()
    scripted_engine.script.chats_wait = True
    first, second = connect(explorer), connect(explorer)
    first.sendall(request("/chat", CHAT_BODY))
    wait_until(lambda: len(scripted_engine.script.bodies) == 1)
    second.sendall(request("/chat", CHAT_BODY))
    wait_until(lambda: _is_waiting(explorer, 1))
    assert explorer.chat().status_code == 503
    second.close()
    with first, connect(explorer) as third:
        wait_until(lambda: _is_waiting(explorer, 0))
        third.sendall(request("/chat", CHAT_BODY))
        wait_until(lambda: _is_waiting(explorer, 1))
        scripted_engine.script.chats_wait = False
        assert read_answers(first, 1)[0][0] == 200
        assert read_answers(third, 1)[0][0] == 200
    assert len(scripted_engine.script.bodies) == 2


def _is_waiting(explorer: RunningExplorer, count: int) -> bool:
    return explorer.deps.pool.waiting == count


# ---------------------------------------------------------------------------------------------- the error boundary


def answer_of(handler: Callable[[Request, Any], Any]) -> list[dict[str, Any]]:
    """What an endpoint with this handler sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/tried", "headers": [], "state": {"deps": None}}
        await Endpoint(handler)(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return sent


def test_a_fault_of_ours_is_a_500_without_details_and_a_traceback_in_the_log(caplog):
    async def broken(_request: Request, _deps: Any) -> Response:
        raise KeyError("a secret")

    start, body = answer_of(broken)
    assert start["status"] == 500
    assert b"secret" not in body["body"]
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "path=/tried" in record.getMessage()


@pytest.mark.parametrize("error", [LedgerError("gone"), EngineLost("e0", "gone")])
def test_what_is_nobodys_fault_is_a_503_wherever_it_is_raised(error, caplog):
    async def unlucky(_request: Request, _deps: Any) -> Response:
        raise error

    start, _ = answer_of(unlucky)
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    assert not any(record.exc_info for record in caplog.records)


def test_with_several_explorers_and_no_database_streams_and_feedback_answer_503(
    explorer, scripted_engine, start_explorer, monkeypatch
):
    start_explorer([scripted_engine.url]).wait_ready()
    deps = explorer.deps
    wait_until(lambda: not deps.membership.is_alone)

    def gone(*_: object) -> Any:
        raise LedgerError("the database is unavailable")

    monkeypatch.setattr("shared.ledger.transitions.open_stream", gone)
    monkeypatch.setattr("shared.ledger.queries.any_stream_open", gone)
    replies = [
        explorer.chat(stream=True),
        explorer.http.post("/feedback", json={"msg_ids": ["chatcmpl-x"], "reward": 1}),
    ]
    assert [reply.status_code for reply in replies] == [503, 503]
    assert all("Retry-After" in reply.headers for reply in replies)


# --------------------------------------------------------------------------------------------------------- uvicorn


def test_the_protocol_uses_only_what_is_public_of_uvicorns():
    """asyncio's callbacks, the parser's and the one for its refusals, that of an answer's end, its transport."""
    extended = {name for name, member in vars(ExplorerProtocol).items() if callable(member)} & set(
        dir(HttpToolsProtocol)
    )
    assert extended - {name for name in dir(asyncio.Protocol) if name.startswith("__")} == {
        "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing",
        "on_message_begin", "on_headers_complete", "on_body", "on_message_complete",
        "on_response_complete", "send_400_response",
    }, f"uvicorn {uvicorn.__version__} calls these otherwise, or has what we have by another name"  # fmt: skip
    source = Path(inspect.getfile(ExplorerProtocol)).read_text()
    used = set(re.findall(r"self\.(\w+)", source)) & set(dir(HttpToolsProtocol))
    assert used <= extended, used - extended
    assert set(re.findall(r"super\(\)\.(\w+)", source)) <= extended | {"__init__"}
