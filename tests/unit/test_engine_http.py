"""The HTTP client of chats, against a server that answers byte for byte what a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from explorer_service.engines import http
from explorer_service.engines.http import EngineHttp
from explorer_service.errors import EngineUnavailable

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}"
# For 127.0.0.1 alone, signed by itself: it protects nothing.
CERTIFICATE = Path(__file__).parents[1] / "support" / "loopback.pem"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this process stands still between two requests."""
    monkeypatch.setattr(http, "KEEPALIVE_S", 600.0)


class Engine:
    """A server that gives each connection's requests to `answers`, one after the other; then it only listens."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self._answers = list(answers)
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self._answers.pop(0)
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            await reader.read()  # until the client closes
        finally:
            writer.close()


@asynccontextmanager
async def serving(engine: Engine, timeout_s: float = 120.0) -> AsyncIterator[tuple[EngineHttp, str]]:
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    client = EngineHttp(timeout_s, 128 << 20)
    try:
        yield client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await client.close()
        server.close()


async def post(client: EngineHttp, url: str) -> bytes:
    response = await client.post(url, "/v1/chat/completions", b'{"a":1}', {"X-Request-Id": "7"})
    try:
        return await response.read()
    finally:
        response.close()


async def test_a_connection_is_used_again_after_a_whole_answer():
    engine = Engine(OK, OK, OK)
    async with serving(engine) as (client, url):
        assert [await post(client, url) for _ in range(3)] == [b"{}"] * 3
    assert engine.connections == 1
    head, _, body = engine.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\nHost: " + url.removeprefix("http://").encode() + b"\r\n" in head
    assert b"X-Request-Id: 7" in head
    assert body == b'{"a":1}'


async def test_status_and_type_are_read_from_the_head():
    engine = Engine(b"HTTP/1.1 404 Not Found\r\nContent-Type: text/Plain; x=y\r\nContent-Length: 0\r\n\r\n")
    async with serving(engine) as (client, url):
        response = await client.post(url, "/", b"", {})
        assert (response.status, response.content_type.lower()) == (404, "text/plain")
        response.close()


@pytest.mark.parametrize("size", [1 << 20, 3 << 20, 64 << 20])
async def test_a_reply_of_many_megabytes_comes_whole(size):
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    async with serving(Engine(head + bytes(size), OK)) as (client, url):
        assert len(await post(client, url)) == size
        assert await post(client, url) == b"{}"


async def test_a_large_reply_that_was_looked_into_stays_to_be_read():
    answer = b"HTTP/1.1 404 X\r\nContent-Length: %d\r\n\r\n" % (3 << 20) + bytes(3 << 20)
    async with serving(Engine(answer)) as (client, url):
        response = await client.post(url, "/", b"", {})
        assert len(await response.peek()) == len(await response.read()) == 3 << 20


async def test_an_engine_waits_when_nobody_takes_its_reply():
    written = 0

    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 << 20))
        for _ in range(100):
            writer.write(bytes(1 << 20))
            await writer.drain()
            written += 1

    async with serving(Engine(flood)) as (client, url):
        response = await client.post(url, "/", b"", {})
        before = -1
        while written != before:  # until it does not get on
            before = written
            await asyncio.sleep(0.2)
        assert written < 64
        response.close()


async def test_a_kept_connection_that_the_engine_has_closed_is_replaced_once():
    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    engine = Engine(OK, close, OK)
    async with serving(engine) as (client, url):
        assert await post(client, url) == b"{}"
        assert await post(client, url) == b"{}"
    assert engine.connections == 2


async def test_a_request_is_sent_twice_at_most_and_only_once_on_a_new_connection():
    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    engine = Engine(OK, close, close, close, OK)
    async with serving(engine) as (client, url):
        assert await post(client, url) == b"{}"
        with pytest.raises(EngineUnavailable, match="closed the connection"):
            await post(client, url)
        assert len(engine.requests) == 3
        with pytest.raises(EngineUnavailable, match="closed the connection"):
            await post(client, url)
        assert len(engine.requests) == 4


async def test_an_idle_connection_is_not_used_when_the_engine_is_about_to_close_it(monkeypatch):
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.0)
    engine = Engine(OK, OK)
    async with serving(engine) as (client, url):
        await post(client, url)
        await post(client, url)
    assert engine.connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection():
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    async with serving(Engine(answer)) as (client, url):
        assert await post(client, url) == b"all of it"


async def test_answers_that_only_announce_the_answer_are_passed_over():
    engine = Engine(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, OK)
    async with serving(engine) as (client, url):
        assert await post(client, url) == b"{}"
        assert await post(client, url) == b"{}"
    assert engine.connections == 1


async def test_trailers_are_no_part_of_the_body():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n"
    async with serving(Engine(chunked, OK)) as (client, url):
        assert await post(client, url) == b"{}"
        assert await post(client, url) == b"{}"


async def _short(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")
    await writer.drain()
    writer.close()


async def _unchunked(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "answer",
    [
        _short,
        _unchunked,
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 999 What\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Endless: " + b"x" * (1 << 20),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    ],
    ids=[
        "too short",
        "broken off",
        "not HTTP",
        "another protocol",
        "no status",
        "no length",
        "two lengths",
        "no chunk",
        "endless field",
        "endless head",
    ],
)
async def test_an_answer_that_is_no_answer_is_refused_and_its_connection_closed(answer):
    engine = Engine(answer, OK, OK)
    async with serving(engine) as (client, url):
        with pytest.raises(EngineUnavailable, match=r".+"):
            await post(client, url)
        before = engine.connections
        assert await post(client, url) == b"{}"
    assert engine.connections == before + 1


@pytest.mark.parametrize("status", [204, 205, 304, 600, 999])
async def test_a_status_that_is_no_answer_to_a_request_is_refused_with_its_head(status):
    async with serving(Engine(b"HTTP/1.1 %d What\r\nContent-Length: 0\r\n\r\n" % status)) as (client, url):
        with pytest.raises(EngineUnavailable, match=f"status {status}"):
            await client.post(url, "/", b"", {})


async def test_a_second_answer_to_one_request_is_given_to_nobody():
    engine = Engine(OK + OK.replace(b"{}", b"[]"), OK)
    async with serving(engine) as (client, url):
        assert await post(client, url) == b"{}"
        assert await post(client, url) == b"{}"
    assert engine.connections == 2


async def test_a_connection_whose_answer_was_not_read_to_its_end_is_closed():
    started = asyncio.Event()
    ended = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        started.set()
        await reader.read()
        ended.set()

    async with serving(Engine(endless, OK)) as (client, url):
        response = await client.post(url, "/", b"", {})
        await started.wait()
        assert not response.is_complete
        response.close()
        await asyncio.wait_for(ended.wait(), 60)


async def test_an_engine_that_never_answers_is_given_up_in_time():
    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(Engine(silent), timeout_s=0.2) as (client, url):
        with pytest.raises(TimeoutError):
            await post(client, url)


async def test_nothing_that_listens_is_an_engine_that_is_away():
    async with serving(Engine()) as (client, _):
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1|refused"):
            await post(client, "http://127.0.0.1:9")


async def test_https_is_verified(monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server = await asyncio.start_server(Engine(OK), "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stranger, friend = EngineHttp(120.0, 1 << 20), EngineHttp(120.0, 1 << 20)
    with pytest.raises(EngineUnavailable, match="certificate"):
        await post(stranger, url)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert await post(friend, url) == b"{}"
    await asyncio.gather(stranger.close(), friend.close())
    server.close()
