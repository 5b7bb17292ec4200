"""The end of a stream: a caller that gets the last finish reason finds its rows stored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import func, select

from shared.errors import LedgerError
from shared.ledger.tables import experiences
from tests.support.scripted_answers import token_events
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer

FINISHED = '"finish_reason": "stop"'


class TwoChoices(ScriptedEngine):
    """Streams all tokens of the first choice, then all of the second."""

    async def _stream(self, request: web.Request, body: dict[str, Any], msg_id: str) -> web.StreamResponse:
        head = {"id": msg_id, "object": "chat.completion.chunk", "model": body["model"]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(2):
            for event in token_events(self.script, self._sampled(body), body, head):
                event["choices"][0]["index"] = index
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def scripted_engine():
    made = TwoChoices()
    yield made
    made.stop()


def stored(explorer: RunningExplorer) -> int:
    with explorer.ledger.read() as connection:
        return connection.execute(select(func.count()).select_from(experiences)).scalar_one()


@pytest.mark.parametrize("more", [{}, {"prompt": ["a", "b"]}])
def test_a_caller_that_leaves_at_the_last_finish_reason_has_all_its_rows(explorer, more):
    """Also with a field of completions, which chats ignore."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2, **more}
    for chats in range(1, 11):
        with explorer.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            ends = (line for line in reply.iter_lines() if FINISHED in line)
            assert [json.loads(next(ends).removeprefix("data: "))["choices"][0]["index"] for _ in range(2)] == [0, 1]
        assert stored(explorer) == 2 * chats


def test_a_caller_sees_no_last_finish_reason_if_the_rows_cannot_be_stored(explorer, monkeypatch):
    async def fail(*_args: object) -> None:
        raise LedgerError("a fault was put in")

    monkeypatch.setattr(explorer.deps.writer, "record", fail)
    lines = explorer.chat(stream=True, n=2).text.splitlines()
    assert sum(FINISHED in line for line in lines) == 1, "the end of the first choice alone"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "ledger_unavailable"
