"""Who names a version learns why it does not serve, but no address of an engine."""

from __future__ import annotations

import httpx

from shared.ledger.queries import list_versions
from tests.support.adapters import publish_and_wait, state
from tests.support.scripted_adapters import name_of, publish_row, write_adapter
from tests.support.servers import wait_until


def test_a_named_version_that_an_engine_rejected_is_refused_without_the_engines_address(explorer, scripted_engine):
    publish_and_wait(explorer, 1)
    explorer.http.post("/versions/1/promote").raise_for_status()
    write_adapter(explorer.config.root, 2)
    scripted_engine.script.wrong_probe_for.add(name_of(explorer, 2))
    publish_row(explorer, 2)
    replies: list[httpx.Response] = []

    def is_rejected() -> bool:
        replies.append(explorer.chat(model="agent@2"))
        return state(explorer, 2) == "REJECTED"

    wait_until(is_rejected)
    replies.append(explorer.chat(model="agent@2"))
    assert (replies[-1].status_code, "REJECTED" in replies[-1].text) == (404, True)
    with explorer.ledger.read() as connection:
        reason = str(next(row.reason for row in list_versions(connection) if row.version == 2))
    assert scripted_engine.url in reason
    assert not any(scripted_engine.url in reply.text for reply in replies)
