"""Chats that the ledger cannot store: the caller sees it, and chats that are stored at the same time are not lost."""

from __future__ import annotations

import asyncio
import json

from sqlalchemy.exc import IntegrityError

from shared.errors import LedgerError
from shared.ledger.queries import count_by_state
from tests.support.samples import sample


def test_a_reply_that_cannot_be_recorded_is_an_error_the_caller_sees(explorer):
    with explorer.ledger.write() as connection:
        connection.exec_driver_sql("ALTER TABLE payloads RENAME TO hidden")
    reply = explorer.chat()
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "ledger_unavailable"
    events = [line for line in explorer.chat(stream=True).text.splitlines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "ledger_unavailable"
    with explorer.ledger.write() as connection:
        connection.exec_driver_sql("ALTER TABLE hidden RENAME TO payloads")
    assert explorer.chat().status_code == 200
    with explorer.ledger.read() as connection:
        assert sum(count_by_state(connection).values()) == 1


def test_a_sample_that_cannot_be_stored_does_not_take_others_of_its_group_along(explorer):
    """Many at once go into one statement; one of them that breaks a rule fails alone."""
    writer = explorer.deps.writer

    async def all_at_once() -> list[object]:
        names = [f"m{n}" for n in range(20)] + ["m3"]
        return await asyncio.gather(*(writer.record([sample(name)]) for name in names), return_exceptions=True)

    results = asyncio.run_coroutine_threadsafe(all_at_once(), writer._loop).result(120)
    assert sum(result is None for result in results) == 20
    (refused,) = (result for result in results if result is not None)
    assert isinstance(refused, IntegrityError | LedgerError)
    with explorer.ledger.read() as connection:
        assert sum(count_by_state(connection).values()) == 20
