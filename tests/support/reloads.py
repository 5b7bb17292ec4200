"""Helpers for tests of reloads: queries to an explorer and its ledger, and changes by other explorers."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
from sqlalchemy import update

from explorer_service.engines.admin import EngineAdmin
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions, read_engine
from shared.ledger.tables import leases
from tests.support.script import Script
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, wait_until

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.1}


def states(explorer: RunningExplorer) -> dict[int, str]:
    with explorer.ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def versions_of_a_stream_across(explorer: RunningExplorer, script: Script, version: int) -> tuple[int, int]:
    """The versions in the row of a stream during which a version is taken up: of its first and of its last token."""
    script.stream_slowly()
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        events = reply.iter_lines()
        next(events)
        publish(explorer, version)
        wait_until(lambda: explorer.deps.pool.engines[0].version == version)
        script.gap_s = 0.0
        assert [event for event in events if event][-1] == "data: [DONE]"
    with explorer.ledger.read() as connection:
        row = connection.exec_driver_sql("SELECT version, version_end FROM experiences").one()
    return row.version, row.version_end


def shown(explorer: RunningExplorer) -> dict[str, object]:
    """Its engine, as /status shows it to an admin."""
    engine: dict[str, object] = explorer.http.get("/status").json()["engines"][0]
    return engine


def announced(explorer: RunningExplorer) -> tuple[str, int | None]:
    """The last announcement of the engine's owner."""
    with explorer.ledger.read() as connection:
        row = read_engine(connection, explorer.deps.leases.key(explorer.config.explorer.engines[0].url))
    assert row is not None
    return row.state, row.version


def reject(explorer: RunningExplorer, *versions: int) -> None:
    with explorer.ledger.write() as connection:
        for version in versions:
            assert transitions.reject_version(connection, version, "withdrawn", by="trainer")


def take_the_turn(ledger: Ledger, owner: str | None, seconds: float = 5.0) -> None:
    """Give the lease `reload` to another explorer; None: to nobody."""
    with ledger.write() as connection:
        turn = update(leases).where(leases.c.name == "reload")
        connection.execute(turn.values(owner=owner, until=time.time() + seconds))


def give_up_hung_loads(patch: pytest.MonkeyPatch, *engines: ScriptedEngine) -> None:
    """A load that hangs exceeds its time limit soon. All other loads have the configured limit."""
    load = EngineAdmin.reload_weights

    async def reload_weights(admin: EngineAdmin, folder: Path) -> None:
        if any(engine.url == admin.url and folder.name in engine.script.hung_loads for engine in engines):
            admin = copy.copy(admin)
            admin._load_timeout_s = 0.6
        await load(admin, folder)

    patch.setattr(EngineAdmin, "reload_weights", reload_weights)
