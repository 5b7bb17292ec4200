"""A stream that the engine ends without its last word."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.support.scripted_answers import token_events
from tests.support.scripted_engine import ScriptedEngine


class Unfinished(ScriptedEngine):
    """Streams all tokens and closes the stream without [DONE]."""

    async def _stream(self, request: web.Request, body: dict[str, Any], msg_id: str) -> web.StreamResponse:
        head = {"id": msg_id, "object": "chat.completion.chunk", "model": body["model"]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in token_events(self.script, self._sampled(body), body, head):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response


@pytest.fixture
def scripted_engine():
    made = Unfinished()
    yield made
    made.stop()


def test_it_ends_with_an_error_for_it_is_not_recorded(explorer):
    events = explorer.chat(stream=True).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_reply"
    with explorer.ledger.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM experiences").scalar() == 0


def test_unrecorded_it_passes_as_it_is(explorer):
    assert "error" not in explorer.chat(stream=True, store=False).text
