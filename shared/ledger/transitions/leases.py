"""Named leases: what one process at a time may do, on all machines that share the ledger.

A lease is by the database's clock, so that hosts may disagree about the time. It ends when it is not renewed, when its
owner releases it, and at once when its owner is known to be gone. An explorer's heartbeat renews all that it holds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, or_, select, update

from shared.ledger.connect import database_time, insert_into
from shared.ledger.tables import leases
from shared.process import is_gone

LEASE_S = 6.0  # how long a lease lasts without being renewed


def acquire_lease(connection: Connection, name: str, owner: str) -> bool:
    """Take a free lease, or renew one's own. False: another owner has it.

    owner: `shared.process.process_name()`. A lease that ends later than any could is from before the clock was put
    back, and counts as none.
    """
    now = database_time(connection)
    unowned = insert_into(connection, leases).values(name=name, owner=None, until=0.0)
    connection.execute(unowned.on_conflict_do_nothing())
    held_by = connection.execute(select(leases.c.owner).where(leases.c.name == name)).scalar()
    ended = or_(leases.c.until < now, leases.c.until > now + LEASE_S)
    free = [leases.c.owner == owner, leases.c.owner.is_(None), ended]
    if held_by is not None and is_gone(held_by):
        free.append(leases.c.owner == held_by)
    taken = update(leases).where(leases.c.name == name, or_(*free)).values(owner=owner, until=now + LEASE_S)
    return connection.execute(taken).rowcount == 1


def renew_lease(connection: Connection, name: str, owner: str) -> bool:
    """Hold it for longer. False: it has ended, or another owner has it, and what it allows must stop."""
    now = database_time(connection)
    own = (leases.c.name == name, leases.c.owner == owner, leases.c.until >= now)
    return connection.execute(update(leases).where(*own).values(until=now + LEASE_S)).rowcount == 1


def renew_leases(connection: Connection, owner: str, now: float) -> None:
    """Hold all leases of this owner for longer."""
    connection.execute(update(leases).where(leases.c.owner == owner).values(until=now + LEASE_S))


def release_lease(connection: Connection, name: str, owner: str) -> None:
    """Free it at once, if it is this owner's."""
    _free(connection, leases.c.name == name, leases.c.owner == owner)


def release_leases(connection: Connection, owner: str) -> None:
    """Free all leases of this owner."""
    _free(connection, leases.c.owner == owner)


def _free(connection: Connection, *which: Any) -> None:
    connection.execute(update(leases).where(*which).values(owner=None, until=0.0))
