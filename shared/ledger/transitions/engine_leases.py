"""Engines that several explorers share: one explorer owns each engine, by a lease, and the others follow its row.

Each change of an engine's state increments its generation. An explorer acknowledges a generation once it sends the
engine no more chats, and holds back what requests in flight get from it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, or_, update

from shared.ledger.connect import database_clock, database_time, insert_into
from shared.ledger.tables import engines

ENGINE_LEASE_S = 6.0  # how long an owner without a heartbeat keeps an engine


def acquire_engine(connection: Connection, url: str, explorer: str) -> bool:
    """Acquire a free engine, or renew the lease. Returns False if another explorer owns it.

    A lease that ends much later than possible dates from before the clock was set back, and is ignored. After a small
    step back, the owner keeps it.
    """
    now = database_time(connection)
    unowned = {"owner": None, "owner_until": 0.0, "state": "unavailable", "version": None, "generation": 0}
    connection.execute(insert_into(connection, engines).values(url=url, **unowned).on_conflict_do_nothing())
    until = now + ENGINE_LEASE_S
    ended = or_(engines.c.owner_until < now, engines.c.owner_until > until + ENGINE_LEASE_S)
    free = or_(engines.c.owner == explorer, engines.c.owner.is_(None), ended)
    acquired = update(engines).where(engines.c.url == url, free)
    return connection.execute(acquired.values(owner=explorer, owner_until=until)).rowcount == 1


def set_engine_state(
    connection: Connection,
    url: str,
    explorer: str,
    state: str,
    version: int | None,
    *,
    spoiled: bool = False,
    switched_at: float | None = None,
) -> int | None:
    """Store the engine's state, as its owner. Returns its generation; None: the explorer no longer owns it.

    spoiled: the requests in flight were sampled by weights that failed their proof. switched_at:
    clock.since_boot_s() of this machine, when the weights were replaced.
    """
    generation = engines.c.generation + 1
    values: dict[str, Any] = {"state": state, "version": version, "generation": generation}
    if spoiled:
        values["spoiled"] = generation
    if switched_at is not None:
        values["switched_at"] = switched_at + database_clock(connection)
    mine = (engines.c.url == url, engines.c.owner == explorer)
    changed = update(engines).where(*mine).values(values).returning(engines.c.generation)
    return connection.execute(changed).scalar()


def confirm_engine(connection: Connection, url: str, explorer: str, generation: int) -> bool:
    """Renew the lease. Returns whether the explorer still owns the engine, and its generation has not changed."""
    unmoved = (engines.c.url == url, engines.c.owner == explorer, engines.c.generation == generation)
    until = database_time(connection) + ENGINE_LEASE_S
    return connection.execute(update(engines).where(*unmoved).values(owner_until=until)).rowcount == 1


def renew_engines(connection: Connection, explorer: str, now: float) -> None:
    """Extend the leases of all engines that the explorer owns."""
    connection.execute(update(engines).where(engines.c.owner == explorer).values(owner_until=now + ENGINE_LEASE_S))


def release_engine(connection: Connection, url: str, explorer: str) -> None:
    """Release an engine, if the explorer owns it."""
    mine = (engines.c.url == url, engines.c.owner == explorer)
    connection.execute(update(engines).where(*mine).values(owner=None, owner_until=0.0))


def release_engines(connection: Connection, explorer: str) -> None:
    """Release all engines that the explorer owns."""
    connection.execute(update(engines).where(engines.c.owner == explorer).values(owner=None, owner_until=0.0))
