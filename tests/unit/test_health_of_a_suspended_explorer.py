"""The time limit of a health check if it is the explorer that stood still: its machine slept, its container froze."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from explorer_service.engines import admin
from explorer_service.errors import EngineTimeout

LIMIT_S = 0.3


class SlowEngine(ThreadingHTTPServer):
    """It answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Health)
        self.asked, self.may_answer = 0, threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Health(BaseHTTPRequestHandler):
    server: SlowEngine

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.may_answer.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine(monkeypatch) -> Iterator[SlowEngine]:
    monkeypatch.setattr(admin, "HEALTH_TIMEOUT_S", LIMIT_S)
    with SlowEngine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_health_check_during_which_the_explorer_was_suspended_is_repeated_once(engine, answers):
    async with admin.open_client() as client:
        check = asyncio.create_task(admin.EngineAdmin(client, engine.url, "policy", 60.0).check_health())
        for number in range(1, 2 if answers else 3):
            while engine.asked < number:  # noqa: ASYNC110 — counted by threads
                await asyncio.sleep(0.001)
            if answers:
                engine.may_answer.set()
            time.sleep(LIMIT_S + 2.0)  # noqa: ASYNC251 — the whole process stands still
        with contextlib.nullcontext() if answers else pytest.raises(EngineTimeout):
            await check
        assert engine.asked == 2


async def test_an_engine_that_does_not_answer_its_health_check_is_unavailable(engine):
    async with admin.open_client() as client:
        with pytest.raises(EngineTimeout, match=r"has not answered within 0\.3 s"):
            await admin.EngineAdmin(client, engine.url, "policy", 60.0).check_health()
