"""Explorers on one ledger: who lives, who keeps which engine, and what state that engine is in.

One explorer keeps an engine (a lease) and moves it from version to version; the others follow its row. A move has a
generation; each explorer acknowledges it once it gives the engine no more chats: none crosses a reload unseen.
Leases and heartbeats compare clocks of different hosts: keep them within a second or two (NTP). An explorer that was
killed on this machine is known to be dead at once, by its name: who starts in its place need not wait for its leases.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from shared.ledger.connect import DriverCursor, driver_mark
from shared.ledger.tables import engines, explorers, open_streams
from shared.lifecycle import is_gone

LEASE_S = 6.0  # how long an engine stays with a keeper that is not heard of
LIVE_S = 6.0  # an explorer that was not heard of for so long is not waited for
SILENT_S = 60.0  # and after so long it is taken for dead


# As drivers take them, by their mark for a parameter: every explorer says them all the time.
_BEATS = {
    mark: (
        f"INSERT INTO {explorers.name} (id, acknowledged, heartbeat_at) VALUES ({mark}, {mark}, {mark})"
        " ON CONFLICT (id) DO UPDATE SET acknowledged = excluded.acknowledged, heartbeat_at = excluded.heartbeat_at",
        f"UPDATE {engines.name} SET keeper_until = {mark} WHERE keeper = {mark}",
        f"SELECT id, heartbeat_at FROM {explorers.name}",
    )
    for mark in ("?", "%s")
}


@dataclass(frozen=True, slots=True)
class EngineRow:
    """What the keeper of an engine says of it."""

    url: str
    keeper: str | None
    state: str
    version: int | None
    generation: int


def beat(connection: Connection, explorer: str, acknowledged: dict[str, int]) -> int:
    """The explorer lives, keeps its engines, and has acknowledged these generations, by engine url.

    Does for explorers that died what they could not do themselves. Returns how many live, this one included.
    """
    now = time.time()
    say, keep_on, who_else = _BEATS[driver_mark(connection)]
    with DriverCursor(connection) as cursor:
        cursor.execute(say, (explorer, msgspec.json.encode(acknowledged), now))
        cursor.execute(keep_on, (now + LEASE_S, explorer))
        heard: dict[str, float] = dict(cursor.execute(who_else).fetchall())
    dead = [name for name, heard_at in heard.items() if heard_at < now - SILENT_S or is_gone(name)]
    for name in dead:
        leave(connection, name)
    return sum(heard_at > now - LIVE_S for name, heard_at in heard.items() if name not in dead)


def leave(connection: Connection, explorer: str) -> None:
    """The explorer ends: its engines are free, its streams are over."""
    connection.execute(update(engines).where(engines.c.keeper == explorer).values(keeper=None, keeper_until=0.0))
    connection.execute(delete(open_streams).where(open_streams.c.explorer == explorer))
    connection.execute(delete(explorers).where(explorers.c.id == explorer))


def live_explorers(connection: Connection) -> dict[str, dict[str, int]]:
    """Explorers that were heard of lately, with the generations they have acknowledged."""
    query = select(explorers).where(explorers.c.heartbeat_at > time.time() - LIVE_S)
    return {row.id: msgspec.json.decode(row.acknowledged) for row in connection.execute(query)}


def keep_engine(connection: Connection, url: str, explorer: str) -> bool:
    """Take an engine that nobody keeps, or go on keeping it. False: another explorer keeps it."""
    now = time.time()
    make: Any = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    empty = make(engines).values(url=url, keeper=None, keeper_until=0.0, state="away", version=None, generation=0)
    connection.execute(empty.on_conflict_do_nothing())
    free = or_(engines.c.keeper == explorer, engines.c.keeper.is_(None), engines.c.keeper_until < now)
    taken = update(engines).where(engines.c.url == url, free).values(keeper=explorer, keeper_until=now + LEASE_S)
    return connection.execute(taken).rowcount == 1


def move_engine(connection: Connection, url: str, explorer: str, state: str, version: int | None) -> int | None:
    """The keeper says where its engine stands. Returns the move's generation; None when it keeps it no longer."""
    moved = (
        update(engines)
        .where(engines.c.url == url, engines.c.keeper == explorer)
        .values(state=state, version=version, generation=engines.c.generation + 1)
        .returning(engines.c.generation)
    )
    return connection.execute(moved).scalar()


def read_engine(connection: Connection, url: str) -> EngineRow | None:
    columns = (engines.c.url, engines.c.keeper, engines.c.state, engines.c.version, engines.c.generation)
    row = connection.execute(select(*columns).where(engines.c.url == url)).one_or_none()
    return None if row is None else EngineRow(**row._mapping)


def open_stream(connection: Connection, msg_id: str, explorer: str) -> None:
    """A caller is about to learn this id, and its row does not stand yet."""
    connection.execute(insert(open_streams).values(msg_id=msg_id, explorer=explorer))


def close_stream(connection: Connection, msg_id: str) -> None:
    """The row stands, or never will."""
    connection.execute(delete(open_streams).where(open_streams.c.msg_id == msg_id))


def any_stream_open(connection: Connection, msg_ids: Collection[str]) -> bool:
    """Whether a living explorer still streams one of these."""
    living = select(explorers.c.id).where(explorers.c.heartbeat_at > time.time() - LIVE_S)
    query = select(open_streams.c.msg_id).where(open_streams.c.msg_id.in_(msg_ids), open_streams.c.explorer.in_(living))
    return connection.execute(query.limit(1)).first() is not None
