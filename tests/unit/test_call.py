"""A request below ASGI, on uvicorn's protocol without a socket: what comes is read whole, what goes is framed, and who
leaves is noticed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from explorer_service.call import Call
from explorer_service.door import ENGINE_ROUTES, Door
from explorer_service.errors import bad_request
from shared.config import ExplorerConfig

CONFIG = ExplorerConfig.model_validate({"max_body_bytes": 100, "body_timeout_s": 0.05})
LARGE = ExplorerConfig.model_validate({"max_body_bytes": 1_000_000})
HEAD = b"POST /tried HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
Handler = Callable[[Call, Any], Awaitable[None]]


class Wire(asyncio.Transport):
    """Keeps what is written, and lets the caller stop reading or leave."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.is_closed = False
        self.is_read = True

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.said += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


@pytest.fixture
def open_door(monkeypatch) -> Iterator[Callable[[Handler], tuple[Door, Wire]]]:
    def opened(handler: Handler) -> tuple[Door, Wire]:
        monkeypatch.setitem(ENGINE_ROUTES, b"/tried", handler)

        async def app(_scope: object, _receive: object, send: Callable[[Any], Awaitable[None]]) -> None:
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(app, access_log=False, lifespan="off", http=Door)
        config.load()
        door, wire = Door(config, ServerState(), {"deps": None}), Wire()
        door.connection_made(wire)
        return door, wire

    yield opened


async def _turn() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def _all_answered(door: Door) -> None:
    while door.tasks:
        await asyncio.wait(door.tasks)


async def _echo(call: Call, _deps: Any) -> None:
    call.answer(Response(await call.read(CONFIG)))


@pytest.mark.parametrize(
    "target", [b"/tried", b"/tried?a=1", b"/tri%65d", b"http://x/tried"], ids=["plain", "query", "escaped", "absolute"]
)
async def test_a_path_may_be_written_in_many_ways(open_door, target):
    door, wire = open_door(_echo)
    door.data_received((HEAD % 2).replace(b"/tried", target) + b"hi")
    await _turn()
    assert wire.said.startswith(b"HTTP/1.1 200 OK\r\n") and wire.said.endswith(b"\r\n\r\nhi")


@pytest.mark.parametrize("change", [(b"POST", b"PUT"), (b"/tried", b"/other")], ids=["method", "path"])
async def test_everything_else_goes_to_the_app(open_door, change):
    door, wire = open_door(_echo)
    door.data_received((HEAD % 2).replace(*change) + b"hi")
    await _turn()
    assert wire.said.startswith(b"HTTP/1.1 404")


async def test_a_body_comes_in_parts(open_door):
    door, wire = open_door(_echo)
    for part in (HEAD[:20], HEAD[20:] % 6, b"ab", b"cdef"):
        door.data_received(part)
        await _turn()
    assert wire.said.endswith(b"content-length: 6\r\n\r\nabcdef")


@pytest.mark.parametrize("parts", [1, 4], ids=["at once", "in parts"])
async def test_after_a_long_body_its_caller_is_still_heard(open_door, parts):
    """uvicorn stops reading when 64 KiB wait to be taken."""
    read = []

    async def hang(call: Call, _deps: Any) -> None:
        read.append(len(await call.read(LARGE)))
        await asyncio.Event().wait()

    door, wire = open_door(hang)
    door.data_received(HEAD % 400_000 if parts > 1 else HEAD % 400_000 + b"x" * 400_000)
    for _ in range(parts if parts > 1 else 0):
        await _turn()
        assert wire.is_read
        door.data_received(b"x" * 100_000)
    assert not wire.is_read
    await _turn()
    assert read == [400_000] and wire.is_read
    door.connection_lost(None)
    await _turn()
    assert not door.tasks


async def test_who_asks_whether_to_go_on_is_told_so(open_door):
    door, wire = open_door(_echo)
    door.data_received((HEAD % 2).replace(b"Host", b"Expect: 100-continue\r\nHost"))
    await _turn()
    assert wire.said == b"HTTP/1.1 100 Continue\r\n\r\n"
    door.data_received(b"hi")
    await _turn()
    assert wire.said.endswith(b"\r\n\r\nhi")


async def test_an_upgrade_that_is_not_offered_is_passed_over(open_door):
    """Java's HTTP client asks for h2c with every first request."""
    door, wire = open_door(_echo)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\nHost"
    door.data_received((HEAD % 2).replace(b"Host", offer) + b"hi")
    await _turn()
    assert wire.said.startswith(b"HTTP/1.1 200 OK\r\n") and wire.said.endswith(b"\r\n\r\nhi")


@pytest.mark.parametrize("parts", [1, 2], ids=["at once", "after its head"])
async def test_a_body_that_reads_like_an_offer_is_left_alone(open_door, parts):
    body = b"POST \r\nUpgrade: h2c\r\n\r\n"
    door, wire = open_door(_echo)
    for part in [HEAD % len(body) + body] if parts == 1 else [HEAD % len(body), body]:
        door.data_received(part)
        await _turn()
    assert wire.said.endswith(b"\r\n\r\n" + body)


async def test_a_body_may_be_neither_too_long_nor_too_slow(open_door):
    door, wire = open_door(_echo)
    door.data_received(HEAD % 10_000 + b"x" * 101)
    await _turn()
    assert wire.said.startswith(b"HTTP/1.1 413")
    door, wire = open_door(_echo)
    door.data_received(HEAD % 2 + b"h")
    await _all_answered(door)
    assert wire.said.startswith(b"HTTP/1.1 408")


async def test_requests_sent_at_once_are_answered_in_order(open_door):
    async def second_is_quicker(call: Call, _deps: Any) -> None:
        body = await call.read(CONFIG)
        await asyncio.sleep(0.02 if body == b"1" else 0)
        call.answer(Response(body))

    door, wire = open_door(second_is_quicker)
    door.data_received((HEAD % 1 + b"1") + (HEAD % 1 + b"2") + (HEAD % 1).replace(b"/tried", b"/other") + b"3")
    await _all_answered(door)
    assert [line.split()[1] for line in wire.said.split(b"\r\n") if b"HTTP/1.1" in line] == [b"200", b"200", b"404"]
    assert wire.said.index(b"\r\n\r\n1HTTP") < wire.said.index(b"\r\n\r\n2HTTP")


@pytest.mark.parametrize(
    ("change", "closes"),
    [((b"Host", b"Connection: close\r\nHost"), True), ((b"1.1", b"1.0"), True), ((b"1.1", b"1.1"), False)],
    ids=["close", "HTTP/1.0", "keep alive"],
)
async def test_a_connection_is_kept_unless_the_caller_wants_it_closed(open_door, change, closes):
    door, wire = open_door(_echo)
    door.data_received((HEAD % 2).replace(*change) + b"hi")
    await _turn()
    assert wire.is_closed == closes == (b"connection: close" in wire.said)


async def test_a_server_that_ends_closes_when_the_answer_is_out(open_door):
    go_on = asyncio.Event()

    async def slow(call: Call, _deps: Any) -> None:
        await go_on.wait()
        call.answer(Response(b"done"))

    door, wire = open_door(slow)
    door.data_received(HEAD % 0)
    await _turn()
    door.shutdown()
    assert not wire.is_closed
    go_on.set()
    await _turn()
    assert wire.is_closed and b"connection: close" in wire.said and wire.said.endswith(b"done")


async def test_a_stream_is_framed_in_chunks(open_door):
    async def stream(call: Call, _deps: Any) -> None:
        call.begin(200, {"X-Some": "header"})
        call.send(b"data: 1\n\n")
        call.end(b"data: [DONE]\n\n")

    door, wire = open_door(stream)
    door.data_received(HEAD % 0)
    await _turn()
    head, _, body = wire.said.partition(b"\r\n\r\n")
    assert b"x-some: header" in head and b"content-type: text/event-stream; charset=utf-8" in head
    assert body == b"9\r\ndata: 1\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def test_a_stream_waits_for_a_caller_who_reads_slowly(open_door):
    sent = []

    async def stream(call: Call, _deps: Any) -> None:
        call.begin(200, {})
        for number in range(3):
            call.send(b"%d" % number)
            sent.append((number, call.is_free))
            await call.drain()
        call.end()

    door, wire = open_door(stream)
    door.pause_writing()  # as the transport does when it holds too much
    door.data_received(HEAD % 0)
    await _turn()
    assert sent == [(0, False)]
    door.resume_writing()
    await _turn()
    assert sent == [(0, False), (1, True), (2, True)]
    assert wire.said.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in the middle of it"])
@pytest.mark.parametrize("cause", [ValueError("a bug"), bad_request("no")], ids=["bug", "refusal"])
async def test_a_failure_is_an_error_or_an_answer_broken_off(open_door, begun, cause):
    async def fail(call: Call, _deps: Any) -> None:
        if begun:
            call.begin(200, {})
            call.send(b"data: 1\n\n")
        raise cause

    door, wire = open_door(fail)
    door.data_received(HEAD % 0)
    await _turn()
    if begun:
        assert wire.is_closed and not wire.said.endswith(b"0\r\n\r\n")
    else:
        assert wire.said.startswith(b"HTTP/1.1 500" if isinstance(cause, ValueError) else b"HTTP/1.1 400")
        assert b'{"error":' in wire.said


@pytest.mark.parametrize("where", ["body", "work", "drain"])
async def test_who_leaves_ends_the_work(open_door, where):
    ended: list[Any] = []

    async def work(call: Call, _deps: Any) -> None:
        try:
            if where == "body":
                await call.read(CONFIG)
            elif where == "drain":
                call.begin(200, {})
                await call.drain()
                call.send(b"to nobody")
                call.end()
            await asyncio.Event().wait()
        finally:
            ended.append(call.status)

    door, wire = open_door(work)
    if where == "drain":
        door.pause_writing()
    door.data_received(HEAD % 2)
    await _turn()
    said = wire.said
    wire.close()
    door.connection_lost(None)
    await _turn()
    assert ended == [499]
    assert wire.said == said
    assert not door.tasks


async def test_who_leaves_at_once_is_not_served(open_door):
    served = []

    async def serve(call: Call, _deps: Any) -> None:
        served.append(call)

    door, _wire = open_door(serve)
    door.data_received(HEAD % 2)
    door.connection_lost(None)
    await _turn()
    assert not served and not door.tasks


async def test_who_leaves_after_the_answer_disturbs_nothing(open_door):
    later = []

    async def answer_and_tidy(call: Call, _deps: Any) -> None:
        call.answer(Response(b"done"))
        await asyncio.sleep(0.01)
        later.append(call.status)

    door, _wire = open_door(answer_and_tidy)
    door.data_received(HEAD % 0)
    await _turn()
    door.connection_lost(None)
    await _all_answered(door)
    assert later == [200]


async def test_a_server_that_ends_its_tasks_is_obeyed(open_door):
    async def hang(_call: Call, _deps: Any) -> None:
        await asyncio.Event().wait()

    door, _wire = open_door(hang)
    door.data_received(HEAD % 0)
    await _turn()
    (task,) = door.tasks
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_connection_that_has_ended_is_free_at_once(open_door):
    """Garbage is collected seldom: what keeps itself alive would pile up where callers keep no connection."""
    door, _wire = open_door(_echo)
    door.data_received(HEAD % 2 + b"hi")
    await _turn()
    door.connection_lost(None)
    await _turn()
    ended = weakref.ref(door)
    gc.disable()
    try:
        del door
        assert ended() is None
    finally:
        gc.enable()
