"""The connections of an event loop: kept, given back once, closed when nobody needs them."""

from __future__ import annotations

import asyncio
import gc

import httpx
import pytest
from flywheel import connections
from flywheel.connections import Connections

from tests.sdk.test_client import answering


def answer(number, request):
    return 200, {"Content-Type": "text/plain"}, b"answer"


@pytest.fixture
def url():
    with answering(answer) as served:
        yield served


async def fetch(client: httpx.AsyncClient, url: str) -> str:
    return (await client.get(url)).text


def count(kept: Connections) -> tuple[int, int]:
    """(connections, idle ones) of the running loop."""
    own = kept.of_loop()
    return len(own._all), sum(map(len, own._idle.values()))


async def test_requests_at_once_have_a_connection_each_and_later_ones_use_them_again(url):
    kept = Connections()
    async with httpx.AsyncClient(transport=kept.asynchronous(), timeout=60) as client:
        assert await asyncio.gather(*(fetch(client, url) for _ in range(8))) == ["answer"] * 8
        assert count(kept) == (8, 8)
        for _ in range(20):
            await fetch(client, url)
        assert count(kept) == (8, 8)
    assert count(kept) == (8, 8), "its clients come and go"
    await kept.aclose()
    assert count(kept) == (0, 0)


async def test_a_stream_uses_its_connection_until_it_is_closed_and_releases_it_once(url):
    kept = Connections()
    async with httpx.AsyncClient(transport=kept.asynchronous(owned=True), timeout=60) as client:
        async with client.stream("GET", url) as reply:
            assert count(kept) == (1, 0)
            await reply.aread()
            assert count(kept) == (1, 1)
            await reply.aclose()
        assert count(kept) == (1, 1)


async def read_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that never answers."""
    await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_what_fails_or_is_cancelled_gives_its_seat_back(url, monkeypatch):
    monkeypatch.setattr(connections, "_MOST", 2)
    kept = Connections()
    silent = await asyncio.start_server(read_only, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    async with httpx.AsyncClient(transport=kept.asynchronous(owned=True), timeout=60) as client, silent:
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:9")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.get(f"http://{host}:{port}"), 0.05)
        assert await asyncio.gather(*(fetch(client, url) for _ in range(6))) == ["answer"] * 6
        assert len(kept.of_loop()._idle[("http", "127.0.0.1", int(url.rpartition(":")[2]))]) <= 2


async def test_a_request_that_is_cancelled_at_any_moment_leaves_no_connection_that_serves_nobody(url):
    """httpx's pool keeps a place for ever for a connection whose request was cancelled before it began."""
    for turns in range(40):
        timeout = httpx.Timeout(60, pool=1.0)
        async with httpx.AsyncClient(transport=Connections().asynchronous(owned=True), timeout=timeout) as client:
            cancelled = asyncio.create_task(fetch(client, url))
            for _ in range(turns):  # of the loop
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert await fetch(client, url) == "answer", turns


async def test_connections_that_were_idle_for_long_are_closed(url, monkeypatch):
    kept = Connections()
    async with httpx.AsyncClient(transport=kept.asynchronous(owned=True), timeout=60) as client:
        await asyncio.gather(*(fetch(client, url) for _ in range(4)))
        monkeypatch.setattr(connections, "_IDLE_S", 0.0)
        for _ in range(6):
            await fetch(client, url)
        assert count(kept) == (1, 1)


def test_each_loop_has_connections_of_its_own(url):
    kept = Connections()

    async def one() -> int:
        async with httpx.AsyncClient(transport=kept.asynchronous(owned=True), timeout=60) as client:
            await fetch(client, url)
            return count(kept)[0]

    assert [asyncio.run(one()) for _ in range(3)] == [1, 1, 1]


def test_connections_of_a_loop_that_ended_are_closed_and_keep_nothing_in_memory(client):
    async def one() -> None:
        async with client.model().async_http_client() as http:
            assert (await http.get(f"{client.url}/health")).status_code == 200

    for _ in range(3):
        asyncio.run(one())
    gc.collect()
    assert not client.explorer.connections._by_loop
