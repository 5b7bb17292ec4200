"""9, reload: the adapters that an engine serves and unloads, and the versions that callers have pinned.

All of these are leases on versions, so that no file is deleted that an engine may request. An engine's leases are its
own: its owner renews them, and they outlive that owner by VERSION_LEASE_S, so that the next owner can read which
adapters the engine has.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, and_, delete, or_, update

from shared.experience import Purpose
from shared.ledger.connect import database_time
from shared.ledger.tables import version_leases
from shared.ledger.transitions.retain import VERSION_LEASE_S, lease_version


def hold_adapters(connection: Connection, engine: str, *, serves: Collection[int], leaving: Collection[int]) -> None:
    """Store which versions an engine serves and which it is unloading, and renew the leases on both.

    A lease on a version that the engine has unloaded expires by itself; until then, explorers that were unavailable
    still find its files.
    """
    its_own = version_leases.c.reader == engine
    no_more = (version_leases.c.purpose == Purpose.SERVING, version_leases.c.version.not_in(sorted(serves)))
    dropped = delete(version_leases).where(its_own, *no_more).returning(version_leases.c.version)
    ended = set(connection.execute(dropped).scalars())
    for purpose, versions in ((Purpose.SERVING, serves), (Purpose.UNLOADING, ended.union(leaving))):
        for version in sorted(versions):
            lease_version(connection, version, reader=engine, purpose=purpose, owner=engine)
    loaded = (its_own, version_leases.c.purpose == Purpose.LOADING)
    connection.execute(delete(version_leases).where(*loaded))


def renew_adapters(connection: Connection, engine: str, *, has: Collection[int]) -> None:
    """Renew the leases on what an engine serves, and on versions that it has and is unloading or about to serve.

    Others expire. For the time of a load, which may be longer than a lease.
    """
    unloading = and_(version_leases.c.purpose == Purpose.UNLOADING, version_leases.c.version.in_(sorted(has)))
    until = database_time(connection) + VERSION_LEASE_S
    held = or_(version_leases.c.purpose == Purpose.SERVING, unloading)
    its_own = (version_leases.c.reader == engine, version_leases.c.until < until)
    connection.execute(update(version_leases).where(*its_own, held).values(until=until))


def expect_adapter(connection: Connection, engine: str, version: int) -> bool:
    """Store that an engine is about to load an adapter. Returns False if its files are deleted.

    The lease belongs to the engine, which continues to load if the explorer that requested it dies; the engine's next
    owner finds the adapter there.
    """
    return lease_version(connection, version, reader=engine, purpose=Purpose.UNLOADING, owner=engine)


def pin_version(connection: Connection, version: int, *, explorer: str, lasts_s: float) -> bool:
    """Keep a pinned version in service for this time. Returns False if its files are deleted."""
    return lease_version(connection, version, reader=explorer, purpose=Purpose.PINNED, owner=explorer, lasts_s=lasts_s)


def renew_pin(connection: Connection, version: int, *, explorer: str, lasts_s: float) -> bool:
    """Renew a pin after another use. Returns False if it has expired, and engines may be unloading the version."""
    now = database_time(connection)
    own = (version_leases.c.version == version, version_leases.c.reader == explorer)
    pinned = (version_leases.c.purpose == Purpose.PINNED, version_leases.c.until > now)
    return connection.execute(update(version_leases).where(*own, *pinned).values(until=now + lasts_s)).rowcount == 1
