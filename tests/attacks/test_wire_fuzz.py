"""Mutated byte streams against the explorer, with h11's parser as the judge of what was asked.

Each request names a model of its own, which its answer repeats: so an answer tells which request it belongs to. Bodies
hold requests that nobody makes.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import h11
import psutil
import pytest

from tests.support.forms import FULL
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config, wait_until

STREAMS = 20_000 if FULL else 300
AT_ONCE = 64
LONGEST_S = 120.0
MEMORY_BYTES = 50 << 20
REFUSALS = {400, 403, 405, 408, 413, 414, 415, 431, 501, 503, 505}
MARK = re.compile(rb"mark-\d+-\d+")
PIECES = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b"0\r\n\r\n", b"5\r\n", b": ", b" ", b"Upgrade: h2c\r\n", b"Upgrade: foo\r\n",
    b"Connection: Upgrade\r\n", b"Connection: close\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n", b"Host: y\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.0",
    b"chunked, gzip", b"\xff\xfe", b"A: " + b"b" * 3000 + b"\r\n", b"X: y\r\n" * 120,
]  # fmt: skip


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningExplorer]:
    engine = ScriptedEngine()
    patch = pytest.MonkeyPatch()
    patch.setattr("explorer_service.api.protocol._LINGER_S", 0.3)
    limits = {"head_timeout_s": 0.7, "body_timeout_s": 0.7}
    running = RunningExplorer(make_config(tmp_path_factory.mktemp("wire"), [engine.url], **limits)).wait_ready()
    yield running
    assert running.chat().status_code == 200, "after all that it serves"
    wait_until(lambda: running.deps.pool.engines[0].in_flight == 0)
    running.stop()
    engine.stop()
    patch.undo()


# --------------------------------------------------------------------------------------------------- what is sent


def make_request(rng: random.Random, mark: str) -> bytes:
    head = "POST /chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 21\r\n\r\n"
    hidden = f'{head}{{"model": "{mark}9"}}'
    body = f'{{"model": "{mark}", "messages": []}}'.encode()
    if rng.random() < 0.3:
        body += b"\r\n\r\n"
    if rng.random() < 0.3:
        body = hidden.encode()
    fields = [b"Host: x", b"Content-Type: application/json"]
    if rng.random() < 0.3:
        offer = rng.choice([b"h2c", b"foo", b"h2c, foo", b"websocket", b"TLS/1.2"])
        fields += [b"Connection: Upgrade", b"Upgrade: " + offer]
    if rng.random() < 0.1:
        fields.append(b"Expect: 100-continue")
    kind = rng.random()
    if kind < 0.2:
        return b"\r\n".join([b"GET /health HTTP/1.1", *fields]) + b"\r\n\r\n"
    path = rng.choice([b"/chat", b"/v1/chat/completions", b"/chat", b"/nowhere"])
    if kind < 0.6:
        fields.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join([b"POST " + path + b" HTTP/1.1", *fields]) + b"\r\n\r\n" + body
    fields.append(b"Transfer-Encoding: chunked")
    cut = rng.randrange(1, len(body))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]))
    trailers = b"Authorization: Bearer x\r\nHost: evil\r\n" if rng.random() < 0.5 else b""
    return (
        b"\r\n".join([b"POST " + path + b" HTTP/1.1", *fields]) + b"\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"
    )


def mutate(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        at, other = rng.randrange(len(data)), rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data = data[:at] + rng.choice(PIECES) + data[at:]
            case 1:
                data = data[:at] + data[at + rng.randrange(1, 8) :]
            case 2:
                data = data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
            case 3:
                data = data[:at] + data[min(at, other) : max(at, other)] + data[at:]
            case _:
                data = data[: max(at, 1)]
        if not data:
            return b"G"
    return data


# ------------------------------------------------------------------------------------------------------ the judge


@dataclass
class Asked:
    """What h11 makes of a stream."""

    marks: list[bytes | None] = field(default_factory=list)  # of each request whose head is whole
    is_clean: bool = False  # the stream ends where its last request does, and the connection goes on


def judge(data: bytes) -> Asked:
    asked = Asked()
    try:
        while data := _as_h11_wants(data):
            server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            server.receive_data(data)
            body = b""
            while not isinstance(event := server.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    return asked
                if isinstance(event, h11.Request):
                    asked.marks.append(None)
                elif isinstance(event, h11.Data):
                    body += event.data
            found = re.match(rb'\s*\{"model": "(mark-\d+-\d+)"', body)
            asked.marks[-1] = found[1] if found else None
            if server.their_state is h11.MUST_CLOSE:
                return asked
            data = server.trailing_data[0]
    except h11.RemoteProtocolError:
        return asked
    asked.is_clean = True
    return asked


def _as_h11_wants(data: bytes) -> bytes:
    """Without what RFC 9112 lets a server pass over and h11 does not: blank lines first, more spaces than one."""
    data = re.sub(rb"\A(?:\r\n)+", b"", data)
    return re.sub(rb"\A([A-Z]+) +(\S+) +(HTTP/1\.[01]\r\n)", rb"\1 \2 \3", data)


def read_all(received: bytes) -> list[tuple[int, bytes | None]]:
    """Status and mark of each whole answer. Fails where the bytes are no answers."""
    answers: list[tuple[int, bytes | None]] = []
    while received:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(received)
        status, body = 0, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return answers
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
        found = MARK.search(body)
        answers.append((status, found[0] if found else None))
        received = client.trailing_data[0]
    return answers


def check(asked: Asked, answers: list[tuple[int, bytes | None]]) -> int:
    """The number of answers with a mark."""
    for number, (status, mark) in enumerate(answers):
        if number < len(asked.marks):
            assert mark is None or mark == asked.marks[number], "an answer to another request"
        else:
            assert mark is None, "an answer to what was no request"
            assert status in REFUSALS and number == len(answers) - 1, "more answers than requests"
    return sum(mark is not None for _, mark in answers)


# ------------------------------------------------------------------------------------------------------ the streams


async def run_stream(explorer: RunningExplorer, seed: int) -> int:
    """The number of its answers with a mark."""
    rng = random.Random(seed)
    data = b"".join(make_request(rng, f"mark-{seed}-{number}") for number in range(rng.randrange(1, 5)))
    data = mutate(rng, data)
    asked = judge(data)
    received = bytearray()
    reader, writer = await asyncio.open_connection(explorer.http.base_url.host, explorer.http.base_url.port)
    try:
        async with asyncio.timeout(LONGEST_S):
            await asyncio.gather(_send(rng, data, writer), _receive(reader, received, asked))
        return check(asked, read_all(bytes(received)))
    except (AssertionError, TimeoutError, h11.ProtocolError) as error:
        raise AssertionError(f"seed {seed}: {error!r}\n{data!r}\n{asked}\n{bytes(received)!r}") from error
    finally:
        writer.close()


async def _send(rng: random.Random, data: bytes, writer: asyncio.StreamWriter) -> None:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 2, 5])))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if writer.is_closing():
            return
        writer.write(data[start:end])
        await asyncio.sleep(0.002)


async def _receive(reader: asyncio.StreamReader, received: bytearray, asked: Asked) -> None:
    """Until the explorer closes the connection, or everything has its answer and nothing more comes."""
    while True:
        is_done = asked.is_clean and len(read_all(bytes(received))) >= len(asked.marks)
        try:
            async with asyncio.timeout(0.05 if is_done else None):
                part = await reader.read(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            return
        if not part:
            return
        received += part


async def test_no_mutated_stream_gets_an_answer_to_another_request_hangs_or_fills_the_memory(explorer):
    seeds = iter(range(STREAMS))
    process = psutil.Process()

    async def work() -> int:
        return sum([await run_stream(explorer, seed) for seed in seeds])

    for seed in range(STREAMS, STREAMS + 50):  # what is allocated once
        await run_stream(explorer, seed)
    before, started = process.memory_info().rss, time.monotonic()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work()) for _ in range(AT_ONCE)]
    assert sum(worker.result() for worker in workers) > STREAMS // 4, "too few answers that tell their request"
    grown = process.memory_info().rss - before
    assert grown < MEMORY_BYTES, f"{grown >> 20} MB more than at the start, after {time.monotonic() - started:.0f} s"
