"""Helpers for tests of reloads: queries to an explorer and its ledger, and changes by other explorers."""

from __future__ import annotations

import time

from sqlalchemy import update

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions, read_engine
from shared.ledger.tables import leases
from tests.support.servers import RunningExplorer

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.1}


def states(explorer: RunningExplorer) -> dict[int, str]:
    with explorer.ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


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
