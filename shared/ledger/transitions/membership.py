"""Explorers on one ledger: heartbeats, and the sign-off of an explorer, by itself or by another one after it died.

Heartbeats and leases use the database's clock, so that hosts may disagree about the time. A heartbeat in the future
dates from before that clock was set back, and is ignored. If the clock has jumped, or its host was suspended, every
heartbeat looks old, including the explorer's own, and does not tell which explorers are alive. For an explorer on this
machine its name tells: a killed one is dead at once, and a running one never is.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, delete, select

from shared.ledger.connect import database_time, insert_into
from shared.ledger.queries.explorers import LIVE_S, Followed
from shared.ledger.tables import explorers, open_streams
from shared.ledger.transitions.engine_leases import release_engines, renew_engines
from shared.ledger.transitions.leases import release_leases, renew_leases
from shared.ledger.transitions.retain import release_version_leases, renew_version_leases
from shared.process import is_gone, is_running

Settings = dict[str, Any]
_DEAD_S = 60.0  # age of a heartbeat from which an explorer is presumed dead


def heartbeat(
    connection: Connection, explorer: str, acknowledged: dict[str, Followed], settings: Settings | None = None
) -> dict[str, Settings]:
    """Record an explorer's heartbeat, renew its engines and leases, and store the states that it has acknowledged.

    settings: those in which all explorers must agree, by key. Signs off explorers that died.
    Returns the settings of the other live explorers, by explorer.
    """
    now = database_time(connection)
    found = connection.execute(select(explorers.c.id, explorers.c.settings, explorers.c.heartbeat_at)).all()
    has_jumped = any(row.id == explorer and abs(now - row.heartbeat_at) > _DEAD_S / 2 for row in found)
    beat = {"acknowledged": msgspec.json.encode(acknowledged), "heartbeat_at": now}
    first = insert_into(connection, explorers).values(id=explorer, settings=msgspec.json.encode(settings or {}), **beat)
    connection.execute(first.on_conflict_do_update(index_elements=[explorers.c.id], set_=beat))
    renew_engines(connection, explorer, now)
    renew_leases(connection, explorer, now)
    renew_version_leases(connection, explorer, now)
    living: dict[str, Settings] = {}
    for other in [row for row in found if row.id != explorer]:
        age_s = 0.0 if has_jumped else abs(now - other.heartbeat_at)
        if is_gone(other.id) or (age_s > _DEAD_S and not is_running(other.id)):
            sign_off(connection, other.id)
        elif age_s < LIVE_S:
            living[other.id] = msgspec.json.decode(other.settings or b"{}")
    return living


def sign_off(connection: Connection, explorer: str) -> None:
    """Sign off an explorer: release its engines and leases, and close its streams."""
    release_engines(connection, explorer)
    release_leases(connection, explorer)
    release_version_leases(connection, explorer)
    connection.execute(delete(open_streams).where(open_streams.c.explorer == explorer))
    connection.execute(delete(explorers).where(explorers.c.id == explorer))
