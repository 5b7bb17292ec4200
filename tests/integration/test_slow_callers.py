"""Callers that are slow on purpose hold up themselves and nobody else."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import time
from collections.abc import Callable, Iterator

from tests.support.forms import one_database
from tests.support.script import Script
from tests.support.servers import RunningExplorer, wait_until

pytestmark = one_database

HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


def connect(explorer, first: bytes) -> socket.socket:
    opened = socket.create_connection((explorer.http.base_url.host, explorer.http.base_url.port), timeout=120)
    opened.sendall(first)
    return opened


def test_hundreds_of_slow_callers_hold_up_nobody(scripted_engine, start_explorer):
    patient = {"head_timeout_s": 600.0, "body_timeout_s": 600.0}
    explorer = start_explorer([scripted_engine.url], **patient).wait_ready()
    with contextlib.ExitStack() as stack:
        slow = []
        for number in range(300):
            begun = HEAD[: 10 + number % 40] if number % 2 else HEAD + b'{"mess'
            slow.append(stack.enter_context(connect(explorer, begun)))
        for _ in range(20):
            assert explorer.chat().status_code == 200
        answered, _, _ = select.select(slow, [], [], 0)
        assert not answered, "the chats waited until the explorer gave these up"


def test_a_body_that_does_not_come_is_given_up(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], body_timeout_s=0.2).wait_ready()
    with connect(explorer, HEAD + b'{"mess') as slow:
        reply = slow.recv(4096)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b'"body_too_slow"' in reply


def test_a_caller_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours(explorer, caplog):
    connect(explorer, HEAD + b'{"mess').close()
    assert explorer.chat().status_code == 200
    assert "a reason of ours" not in caplog.text


def _stands_still(count: Callable[[], int]) -> bool:
    before = count()
    time.sleep(0.3)
    return before == count() > 0


@contextlib.contextmanager
def unread_stream(explorer: RunningExplorer, script: Script) -> Iterator[socket.socket]:
    """A stream whose caller reads nothing, once the explorer waits for the caller."""
    count = 20_000
    script.padding = " " * 1500  # more in all than what the kernel holds for the connections
    script.reply_ids, script.logprobs = list(range(11, 11 + count)), [-0.5] * count
    body = b'{"messages": [], "stream": true, "return_token_ids": true}'
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the explorer soon has to wait
        caller.connect((explorer.http.base_url.host, explorer.http.base_url.port))
        caller.settimeout(120)
        caller.sendall(HEAD.replace(b"1000", str(len(body)).encode()) + body)
        wait_until(lambda: _stands_still(lambda: script.events))
        assert script.events < count, "the explorer read on for a caller who does not"
        yield caller


def test_a_stream_that_nobody_reads_holds_up_nobody(explorer, scripted_engine):
    script = scripted_engine.script
    with unread_stream(explorer, script):
        script.reply_ids, script.logprobs = [11], [-0.5]
        assert all(explorer.chat(stream=bool(number % 2)).status_code == 200 for number in range(20))


def test_a_stream_that_is_read_late_comes_whole_and_in_order(explorer, scripted_engine):
    with unread_stream(explorer, scripted_engine.script) as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        said = bytearray()
        while b"data: [DONE]" not in said[-100:]:
            part = late.recv(1 << 16)
            assert part, said[-500:]
            said += part
    ids = [int(number) for number in re.findall(rb'"token_ids": ?\[(\d+)\]', said)]
    assert ids == scripted_engine.script.reply_ids
