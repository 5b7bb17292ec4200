"""The adapters that an engine serves, and the versions that callers have pinned: both are leases on versions."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from shared.experience import Purpose
from shared.ledger.connect import database_time
from shared.ledger.queries.versions import PINNABLE
from shared.ledger.tables import version_leases, versions


def served_adapters(connection: Connection, engine: str) -> dict[int, str]:
    """Return the versions that an engine serves according to its owner, with the sha256 of each manifest."""
    columns = (versions.c.version, versions.c.manifest_sha256)
    leased = (version_leases.c.reader == engine, version_leases.c.purpose == Purpose.SERVING)
    query = select(*columns).join(version_leases, versions.c.version == version_leases.c.version).where(*leased)
    return {row.version: row.manifest_sha256 or "" for row in connection.execute(query)}


def leased_versions(connection: Connection, engine: str) -> list[int]:
    """Return the versions whose files an engine may read: those that it serves, loads or unloads."""
    query = select(version_leases.c.version).where(version_leases.c.reader == engine).distinct()
    return list(connection.execute(query.order_by(version_leases.c.version)).scalars())


def pinned_versions(connection: Connection) -> list[int]:
    """Return the versions that callers of any explorer have pinned, the most recently used first.

    Pins of versions that were REJECTED or FAILED since then do not count.
    """
    last = func.max(version_leases.c.until)
    pinned = (version_leases.c.purpose == Purpose.PINNED, version_leases.c.until > database_time(connection))
    query = select(versions.c.version).join(version_leases, versions.c.version == version_leases.c.version)
    query = query.where(*pinned, versions.c.state.in_(PINNABLE)).group_by(versions.c.version).order_by(last.desc())
    return list(connection.execute(query).scalars())
