"""Named leases: work that only one process at a time may do, among all machines that share the ledger.

Leases use the database's clock, so that hosts may disagree about the time. A lease ends if it is not renewed, if its
owner releases it, and at once if its owner is known to be gone. An explorer's heartbeat renews all its leases.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, or_, select, update

from shared.ledger.connect import database_time, insert_into
from shared.ledger.tables import leases
from shared.process import is_gone

LEASE_S = 6.0  # lifetime of a lease without renewal


def acquire_lease(connection: Connection, name: str, owner: str) -> bool:
    """Acquire a free lease, or renew one's own. Returns False if another owner has it.

    owner: `shared.process.process_name()`. A lease that ends much later than possible dates from before the clock was
    set back, and is ignored. After a small step back, the owner keeps it.
    """
    now = database_time(connection)
    unowned = insert_into(connection, leases).values(name=name, owner=None, until=0.0)
    connection.execute(unowned.on_conflict_do_nothing())
    held_by = connection.execute(select(leases.c.owner).where(leases.c.name == name)).scalar()
    ended = or_(leases.c.until < now, leases.c.until > now + 2 * LEASE_S)
    free = [leases.c.owner == owner, leases.c.owner.is_(None), ended]
    if held_by is not None and is_gone(held_by):
        free.append(leases.c.owner == held_by)
    taken = update(leases).where(leases.c.name == name, or_(*free)).values(owner=owner, until=now + LEASE_S)
    return connection.execute(taken).rowcount == 1


def renew_lease(connection: Connection, name: str, owner: str) -> bool:
    """Extend the lease. Returns False if it has ended or another owner has it; the work must then stop."""
    now = database_time(connection)
    own = (leases.c.name == name, leases.c.owner == owner, leases.c.until >= now)
    return connection.execute(update(leases).where(*own).values(until=now + LEASE_S)).rowcount == 1


def renew_leases(connection: Connection, owner: str, now: float) -> None:
    """Extend all leases of this owner."""
    connection.execute(update(leases).where(leases.c.owner == owner).values(until=now + LEASE_S))


def release_lease(connection: Connection, name: str, owner: str) -> None:
    """Release the lease at once, if this owner has it."""
    _release(connection, leases.c.name == name, leases.c.owner == owner)


def release_leases(connection: Connection, owner: str) -> None:
    """Release all leases of this owner."""
    _release(connection, leases.c.owner == owner)


def _release(connection: Connection, *which: Any) -> None:
    connection.execute(update(leases).where(*which).values(owner=None, until=0.0))
