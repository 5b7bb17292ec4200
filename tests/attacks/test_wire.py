"""Attacks by the bytes of HTTP itself: one request is never taken for two, and nothing is read without a limit."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from explorer_service.app import Endpoint
from explorer_service.deps import Deps
from tests.support.postgres import sqlite_alone
from tests.support.script import Hold
from tests.support.servers import wait_until
from tests.support.wire import (
    CHAT_BODY,
    STREAM_BODY,
    connect,
    get,
    post,
    post_chunked,
    read_answer,
    read_answers,
    read_to_end,
    send_slowly,
)

HEALTHY = b'{"status":"ok"}'


database_url = sqlite_alone  # nothing here depends on the database


def hashed(name: str, role: str) -> dict[str, str]:
    return {"sha256": hashlib.sha256(name.encode()).hexdigest(), "role": role, "name": name}


# ------------------------------------------------------------------------------------------------------- framing


@pytest.mark.parametrize(
    "protocol", ["foo", "h2c", "h2c, foo", "TLS/1.0", "websocket", "WebSocket", "h2c\r\nUpgrade: x"]
)
def test_the_body_of_a_request_that_offers_another_protocol_is_no_second_request(explorer, protocol):
    hidden = get("/status")
    offer = ("Connection: Upgrade", f"Upgrade: {protocol}")
    with connect(explorer) as opened:
        send_slowly(opened, post("/chat", b"", *offer, length=len(hidden)), hidden, get("/health"))
        refused, health = read_answers(opened, 2)
    assert (refused.status, health.body) == (400, HEALTHY), "the body is no JSON, and the health is the second answer"


@pytest.mark.parametrize("target", ["x:80", "/health", "*"])
def test_the_body_of_a_connect_is_no_second_request(explorer, target):
    hidden = get("/status")
    head = f"CONNECT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(hidden)}\r\n\r\n".encode()
    with connect(explorer) as opened:
        send_slowly(opened, head, hidden)
        received = read_to_end(opened)
    assert b"rows" not in received
    assert received.count(b"HTTP/1.1 ") <= 1


@pytest.mark.parametrize("back", range(6), ids=lambda back: f"{back} bytes before the end")
def test_no_bytes_are_cut_out_of_a_body_wherever_its_head_is_split(explorer, back):
    body = CHAT_BODY + b"\r\nUpgrade: h2c" * 3 + b"\r\n\r\n"
    data = post("/chat", body, "X-Note: h2c")
    cut = data.index(b"\r\n\r\n") + 4 - back
    with connect(explorer) as opened:
        send_slowly(opened, data[:cut], data[cut:] + get("/health"))
        refused, health = read_answers(opened, 2)
    assert (refused.status, health.body) == (400, HEALTHY)


def test_a_head_may_come_byte_by_byte(explorer):
    data = post("/chat", CHAT_BODY, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    with connect(explorer) as opened:
        for byte in data:
            opened.sendall(bytes((byte,)))
        assert read_answer(opened).status == 200


def test_nothing_is_read_from_trailers(scripted_engine, start_explorer):
    explorer = start_explorer(
        [scripted_engine.url], keys=[hashed("key", "admin")], open_feedback_from=["10.0.0.0/8"]
    ).wait_ready()
    trailers = b"Authorization: Bearer key\r\nX-Forwarded-For: 10.1.2.3\r\n"
    with connect(explorer) as opened:
        for path in ("/chat", "/feedback"):
            opened.sendall(post_chunked(path, CHAT_BODY, "X-Forwarded-For: 203.0.113.9", trailers=trailers))
            assert read_answer(opened).status == 401
        opened.sendall(post_chunked("/chat", CHAT_BODY, "Authorization: Bearer key", trailers=trailers))
        assert read_answer(opened).status == 200


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
def test_what_follows_a_chunked_body_is_the_next_request_wherever_packets_end(explorer, cut):
    data = post_chunked("/chat", CHAT_BODY, trailers=b"X: y\r\n")
    with connect(explorer) as opened:
        send_slowly(opened, data[: len(data) - cut], data[len(data) - cut :] + get("/health"))
        chat, health = read_answers(opened, 2)
    assert (chat.status, health.body) == (200, HEALTHY)


def test_garbage_behind_a_running_request_is_not_answered_inside_its_stream(explorer, scripted_engine):
    script = scripted_engine.script
    script.reply_ids, script.logprobs, script.gap_s = list(range(50)), [-0.5] * 50, 0.3
    with connect(explorer, post("/chat", STREAM_BODY)) as opened:
        wait_until(lambda: script.events > 1)
        opened.sendall(b"\x00 garbage\r\n\r\n")
        script.gap_s = 0.0
        received = read_to_end(opened)
    stream, _, rest = received.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"400" not in stream
    assert rest.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET /health HTTP/1.1\nHost: x\n\n", b"\x00" * 10, b"GET\r\n"]
)
def test_what_is_no_request_is_refused_at_once(explorer, garbage):
    with connect(explorer, garbage) as opened:
        assert read_to_end(opened).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "request_bytes",
    [
        "GET /run/é/1/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"POST /commit HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /commit HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n\r\n",
    ],
)
def test_what_the_parser_refuses_is_answered_with_an_error_of_openais_shape(explorer, request_bytes):
    with connect(explorer, request_bytes) as opened:
        head, _, body = read_to_end(opened).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in head
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


# -------------------------------------------------------------------------------------------------------- limits


def test_a_head_of_more_than_64_kB_is_refused_while_it_comes(explorer):
    with connect(explorer, b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000) as opened:
        answer = read_answer(opened)
        assert (answer.status, answer.headers["connection"]) == (431, "close")
        assert json.loads(answer.body)["error"]["code"] == "head_too_large"
        assert read_to_end(opened) == b""


def test_more_than_a_hundred_headers_are_refused(explorer):
    with connect(explorer) as opened:
        opened.sendall(get("/health", *["X: y"] * 99))
        assert read_answer(opened).status == 200
        opened.sendall(get("/health", *["X: y"] * 100))
        assert read_answer(opened).status == 431


def test_a_target_of_more_than_8_kB_is_refused(explorer):
    with connect(explorer, get("/health?" + "a" * 9000)) as opened:
        assert read_answer(opened).status == 414


def test_endless_trailers_are_not_read(explorer):
    data = post_chunked("/chat", CHAT_BODY)[:-2]
    with connect(explorer, data) as opened, pytest.raises(ConnectionError):
        for _ in range(1000):
            opened.sendall(b"a: " + b"b" * 10_000 + b"\r\n")
    assert explorer.chat().status_code == 200


def test_requests_sent_far_ahead_are_dropped_and_the_running_one_is_answered(explorer, scripted_engine):
    hold = scripted_engine.script.on_call["/v1/chat/completions"] = Hold()
    with connect(explorer, post("/chat", CHAT_BODY)) as opened:
        wait_until(lambda: hold.held == 1)
        opened.sendall(get("/health") * 10_000)
        hold.release.set()
        received = read_to_end(opened)
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1 ") < 3000, "held: at most 64 kB"


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_sends_another_request_and_leaves_ends_the_work(explorer, scripted_engine, stream):
    script = scripted_engine.script
    script.chats_wait, script.streams_wait, script.gap_s = True, True, 0.05  # the reply is never complete
    script.reply_ids, script.logprobs = list(range(11, 1011)), [-0.5] * 1000
    opened = connect(explorer, post("/chat", STREAM_BODY if stream else CHAT_BODY))
    wait_until(lambda: script.events > 1 if stream else len(script.bodies) == 1)
    opened.sendall(post("/chat", CHAT_BODY))
    time.sleep(0.05)
    opened.close()
    (engine,) = explorer.deps.pool.engines
    wait_until(lambda: engine.in_flight == 0)
    assert len(script.bodies) == 1
    assert 'flywheel_chat_requests_total{status="499"} 1.0' in explorer.http.get("/metrics").text


def test_a_key_at_its_limit_is_refused_before_its_body_is_read(scripted_engine, start_explorer):
    keys = [{**hashed("key", "chat"), "requests_at_once": 1}]
    explorer = start_explorer([scripted_engine.url], keys=keys).wait_ready()
    key = "Authorization: Bearer key"
    for path in ("/chat", "/v1/completions", "/tokenize"):
        with connect(explorer, post(path, b'{"mess', key, length=1000)), connect(explorer) as second:
            second.sendall(post(path, b"", key, length=8_000_000))
            assert read_answer(second).status == 429
        wait_until(
            lambda: (
                explorer.http.post("/chat", content=b"x", headers={"Authorization": "Bearer key"}).status_code == 400
            )
        )


@pytest.mark.parametrize("item", [b"[],", b"{},", b'{"a":0},', b"0,"])
def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded(explorer, item):
    body = b'{"messages": [[' + item * (6_000_000 // len(item)) + b"0]]}"
    reply = explorer.http.post("/chat", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "body_too_complex")
    text = json.dumps({"messages": [{"role": "user", "content": "word, " * 100_000}]})
    assert explorer.http.post("/chat", content=text).status_code == 200


# ------------------------------------------------------------------------------------------------ HTTP's own rules


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize", "/chat", "/feedback"])
def test_a_line_feed_behind_a_path_is_no_route_and_reaches_no_engine(explorer, scripted_engine, path):
    """The path of a surface that is passed on stands in the request line that the engine gets."""
    with connect(explorer, post(f"{path}%0A", CHAT_BODY)) as opened:
        answer = read_answer(opened)
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (404, "Not Found")
    assert scripted_engine.script.bodies == []


def test_a_request_names_one_host(explorer):
    for head in (b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
        with connect(explorer, head) as opened:
            assert read_answer(opened).status == 400
            assert read_to_end(opened) == b""


@pytest.mark.parametrize("first", [b"GET /health HTTP/1.1\r\n\r\n", get("/ready", "Connection: close")])
def test_a_request_behind_one_whose_answer_ends_the_connection_is_not_begun(explorer, first, monkeypatch):
    begun, answer = [], Endpoint._answer

    def noted(self: Endpoint, request: Request, deps: Deps) -> Any:
        begun.append(request.scope["path"])
        return answer(self, request, deps)

    monkeypatch.setattr(Endpoint, "_answer", noted)
    with connect(explorer, first + post("/feedback", b'{"msg_ids": ["chatcmpl-1"], "reward": 1}')) as opened:
        assert read_to_end(opened).count(b"HTTP/1.1 ") == 1
    assert explorer.chat().status_code == 200
    assert [path for path in begun if path != "/ready"] == ["/v1/chat/completions"]


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
def test_another_version_of_http_is_refused(explorer, version):
    with connect(explorer, b"GET /health HTTP/%b\r\nHost: x\r\n\r\n" % version) as opened:
        assert read_to_end(opened)[9:12] in (b"400", b"505")


def test_a_stream_to_a_caller_of_http_1_0_is_not_chunked(explorer):
    body = post("/chat", STREAM_BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connect(explorer, body) as opened:
        head, _, rest = read_to_end(opened).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b"content-length: %d" % len(rest) in head.lower()


@pytest.mark.parametrize(
    "codings", [("gzip",), ("x", "chunked"), ("chunked", "chunked"), ("chunked, gzip",)], ids=" ".join
)
def test_a_body_in_another_coding_than_chunks_is_refused(explorer, codings):
    fields = [f"Transfer-Encoding: {coding}" for coding in codings]
    request = "\r\n".join(["POST /chat HTTP/1.1", "Host: x", "Content-Type: application/json", *fields]).encode()
    with connect(explorer, request + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n") as opened:
        assert read_answer(opened).status == 501


def test_nobody_is_redirected_to_the_host_that_was_sent(explorer):
    with connect(explorer, post("/feedback/", b"{}").replace(b"Host: x", b"Host: evil.example")) as opened:
        answer = read_answer(opened)
    assert (answer.status, answer.headers.get("location")) == (403, None)


def test_a_401_says_how_to_authenticate(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], keys=[hashed("key", "chat")])
    assert explorer.http.get("/status").headers["WWW-Authenticate"] == "Bearer"
