"""9, reload: which adapters an engine serves and gives up, and which versions callers have pinned.

All of it are leases on versions, so that no file goes that an engine could ask for. Those of an engine are its own: its
owner renews them, and they outlive that owner by VERSION_LEASE_S, in which the next one reads what the engine has.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, delete, update

from shared.experience import Purpose
from shared.ledger.connect import database_time
from shared.ledger.tables import version_leases
from shared.ledger.transitions.retain import lease_version


def hold_adapters(connection: Connection, engine: str, *, serves: Collection[int], leaving: Collection[int]) -> None:
    """Say which versions an engine serves and which it still has and gives up, and renew the leases on both.

    A lease on a version that the engine has given up runs out by itself: that is the time in which nobody who was away
    may find its files gone.
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


def expect_adapter(connection: Connection, engine: str, version: int) -> bool:
    """An engine is about to have an adapter. False: its files are gone.

    The lease is the engine's own, for it loads on when the explorer that asked it to has died; whoever owns the engine
    next finds the adapter there.
    """
    return lease_version(connection, version, reader=engine, purpose=Purpose.UNLOADING, owner=engine)


def pin_version(connection: Connection, version: int, *, explorer: str, lasts_s: float) -> bool:
    """Callers of an explorer name a version: it is to be in service for so long. False: its files are gone."""
    return lease_version(connection, version, reader=explorer, purpose=Purpose.PINNED, owner=explorer, lasts_s=lasts_s)


def renew_pin(connection: Connection, version: int, *, explorer: str, lasts_s: float) -> bool:
    """Callers have named it again. False: it has ended meanwhile, and engines may be giving the version up."""
    now = database_time(connection)
    own = (version_leases.c.version == version, version_leases.c.reader == explorer)
    pinned = (version_leases.c.purpose == Purpose.PINNED, version_leases.c.until > now)
    return connection.execute(update(version_leases).where(*own, *pinned).values(until=now + lasts_s)).rowcount == 1
