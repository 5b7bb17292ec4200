"""Attacks by connections: callers who say nothing, drip, do not read, or come in crowds hold up themselves alone."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from explorer_service.engines.http import EngineHttp
from explorer_service.errors import EngineUnavailable
from tests.support.forms import FULL
from tests.support.postgres import sqlite_alone
from tests.support.processes import REPOSITORY
from tests.support.script import Hold
from tests.support.servers import RunningExplorer, wait_until
from tests.support.wire import CHAT_BODY, STREAM_BODY, connect, get, post, read_answer, read_to_end

SILENT, SLOW, DEAF = (2000, 200, 50) if FULL else (180, 20, 10)
HONEST = 32
HEAD_S, BODY_S = 18, 55  # by then it is closed, also if something stands still: less than the settings' defaults
JSON = {"Content-Type": "application/json"}
CHATS = "/v1/chat/completions"


database_url = sqlite_alone  # nothing here depends on the database


def drip_until_closed(opened: socket.socket, piece: bytes, timeout_s: float) -> None:
    """Send a piece every tenth of a second until the explorer closes the connection. Fails when it does not."""
    deadline = time.monotonic() + timeout_s
    opened.settimeout(0.1)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            opened.sendall(piece)
            with contextlib.suppress(TimeoutError):
                if not opened.recv(4096):
                    return
        raise AssertionError(f"still open after {timeout_s:g} s")


def listen_deafly(explorer: RunningExplorer) -> socket.socket:
    """A stream whose caller reads nothing, and has hardly any room for what it does not read."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((explorer.http.base_url.host, explorer.http.base_url.port))
    deaf.sendall(post("/chat", STREAM_BODY))
    return deaf


# ------------------------------------------------------------------------------------------------------- silence


@pytest.mark.parametrize(
    "first", [b"", b"GET /hea", get("/health")[:-2]], ids=["nothing", "half a line", "half a head"]
)
def test_a_connection_without_a_whole_head_is_closed(scripted_engine, start_explorer, first):
    explorer = start_explorer([scripted_engine.url], head_timeout_s=0.5)
    with connect(explorer, first) as opened:
        assert read_to_end(opened, HEAD_S) == b""


def test_a_head_without_an_end_is_closed_though_it_grows(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], head_timeout_s=0.5)
    with connect(explorer, b"GET /health HTTP/1.1\r\n") as opened:
        drip_until_closed(opened, b"a: b\r\n", HEAD_S)


def test_the_second_head_of_a_connection_has_to_come_in_time_too(scripted_engine, start_explorer, monkeypatch):
    explorer = start_explorer([scripted_engine.url])
    with connect(explorer, get("/health")) as opened:
        assert read_answer(opened).status == 200
        monkeypatch.setitem(vars(explorer.config.explorer), "head_timeout_s", 0.5)  # for the second one alone
        drip_until_closed(opened, b"\r\n", HEAD_S)


@pytest.mark.parametrize("path", ["/health", "/chat"])
def test_a_body_behind_an_early_answer_has_to_come_in_time(scripted_engine, start_explorer, path):
    explorer = start_explorer([scripted_engine.url], body_timeout_s=0.5)
    head = post(path, b"", length=1_000_000)
    with connect(explorer, head if path == "/chat" else head.replace(b"POST", b"GET")) as opened:
        drip_until_closed(opened, b"x", BODY_S)


def test_silent_connections_make_room_for_new_callers(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_connections=20).wait_ready()
    hold = scripted_engine.script.on_call[CHATS] = Hold()
    with contextlib.ExitStack() as stack:
        stack.callback(hold.release.set)
        working = stack.enter_context(connect(explorer, post("/chat", CHAT_BODY)))
        wait_until(lambda: hold.held == 1)
        for number in range(60):
            stack.enter_context(connect(explorer, b"" if number % 2 else post("/chat", b"", length=100)))
        with httpx.Client(base_url=explorer.url, timeout=60) as client:
            assert client.get("/health").status_code == 200
        hold.release.set()
        assert read_answer(working).status == 200, "a running request is never the one that makes room"


def test_when_all_connections_are_busy_a_new_caller_is_told_so(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_connections=2).wait_ready()
    explorer.http.close()
    hold = scripted_engine.script.on_call[CHATS] = Hold()
    with contextlib.ExitStack() as stack:
        stack.callback(hold.release.set)
        busy = [stack.enter_context(connect(explorer, post("/chat", CHAT_BODY))) for _ in range(2)]
        wait_until(lambda: hold.held == 2)
        with connect(explorer, get("/health")) as opened:
            assert read_answer(opened).status == 503
        hold.release.set()
        assert [read_answer(opened).status for opened in busy] == [200, 200]


def test_unfinished_bodies_of_many_callers_have_a_common_bound(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_unfinished_bytes=1_000_000).wait_ready()
    body = CHAT_BODY[:-1] + b" " * 700_000 + CHAT_BODY[-1:]
    with connect(explorer, post("/chat", body[:600_000], length=len(body))) as unfinished:
        held = explorer.deps.bodies
        wait_until(lambda: held.held_bytes >= 600_000)
        with connect(explorer, post("/chat", body[:600_000], length=len(body))) as refused:
            assert read_answer(refused).status == 503
        assert explorer.chat().status_code == 200, "small bodies do not count"
        unfinished.sendall(body[600_000:])
        assert read_answer(unfinished).status == 200
    with connect(explorer, post("/chat", body)) as after:
        assert read_answer(after).status == 200, "what was held is given back"


# ------------------------------------------------------------------------------------------------------ deafness


def test_a_caller_who_does_not_read_loses_its_stream_and_its_slot(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], body_timeout_s=1.0, max_in_flight=2).wait_ready()
    script = scripted_engine.script
    script.reply_ids, script.logprobs, script.padding = list(range(10_000)), [-0.5] * 10_000, " " * 4000
    (engine,) = explorer.deps.pool.engines
    with listen_deafly(explorer), listen_deafly(explorer):
        wait_until(lambda: len(script.bodies) == 2)
        wait_until(lambda: engine.in_flight == 0, BODY_S)
    script.reply_ids, script.logprobs = [11], [-0.5]
    assert explorer.chat().status_code == 200


def test_answers_that_nobody_reads_are_not_made_without_end(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], body_timeout_s=1.0)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((explorer.http.base_url.host, explorer.http.base_url.port))
    deaf.settimeout(0.1)
    deadline = time.monotonic() + BODY_S
    with deaf, pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                deaf.sendall(get("/metrics") * 100)


def test_a_large_answer_to_a_slow_reader_comes_whole(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], body_timeout_s=0.5).wait_ready()
    scripted_engine.script.message = {"content": "x" * 1_000_000}
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    slow.connect((explorer.http.base_url.host, explorer.http.base_url.port))
    received = 0
    with slow:
        slow.sendall(post("/chat", CHAT_BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        while part := slow.recv(65_536):
            received += len(part)
            time.sleep(0.05)
    assert received > 1_000_000


# -------------------------------------------------------------------------------------------------------- crowds


@contextlib.contextmanager
def a_crowd(explorer: RunningExplorer) -> Iterator[None]:
    """Silent, slow and deaf callers beside the honest ones."""
    with contextlib.ExitStack() as stack:
        for number in range(SILENT):
            stack.enter_context(connect(explorer, get("/health")[: number % 20]))
        slow = [stack.enter_context(connect(explorer, post("/chat", b"{", length=1000))) for _ in range(SLOW)]
        for _ in range(DEAF):
            stack.enter_context(listen_deafly(explorer))
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.1):
                for opened in slow:
                    with contextlib.suppress(OSError):
                        opened.send(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        stack.callback(dripping.join)
        stack.callback(ended.set)
        yield


def test_silent_slow_and_deaf_callers_make_no_honest_one_fail(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    scripted_engine.script.padding = " " * 20_000
    scripted_engine.script.reply_ids, scripted_engine.script.logprobs = list(range(500)), [-0.5] * 500
    statuses: list[int] = []

    def be_honest() -> None:
        with httpx.Client(base_url=explorer.url, timeout=60) as client:
            statuses.extend(client.post("/chat", content=CHAT_BODY, headers=JSON).status_code for _ in range(5))

    with a_crowd(explorer):
        honest = [threading.Thread(target=be_honest) for _ in range(HONEST)]
        for thread in honest:
            thread.start()
        for thread in honest:
            thread.join(120)
    assert statuses == [200] * 5 * HONEST


# --------------------------------------------------------------------------------------------------- descriptors

NO_DESCRIPTORS = """
import os, resource, sys
from shared.process import is_gone, process_name
own = process_name()
other = own.replace(f"-{os.getpid()}-", f"-{os.getppid()}-", 1)
ended = own.replace(f"-{os.getpid()}-", "-4194999-", 1)
assert not is_gone(own) and is_gone(other) and is_gone(ended)
parent = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[19]
other = own.replace(own.rpartition("-")[0].partition("-")[2], f"{os.getppid()}-{parent}", 1)
assert not is_gone(other)
opened = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    open("/dev/null")
except OSError as error:
    assert error.errno == 24
print(is_gone(own), is_gone(other), is_gone(ended), flush=True)
"""


def test_a_process_without_descriptors_takes_nobody_for_dead(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS], cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split()[:2] == ["False", "False"], done.stderr


def test_a_connection_that_we_have_no_descriptor_for_is_not_the_engines_fault(explorer, monkeypatch):
    async def refuse(*_args: object, **_kwargs: object) -> None:
        raise EngineUnavailable("Too many open files") from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(EngineHttp, "post", refuse)
    reply = explorer.chat()
    monkeypatch.undo()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_lost")
    (engine,) = explorer.deps.pool.engines
    assert engine.state == "serving"
    assert explorer.chat().status_code == 200
