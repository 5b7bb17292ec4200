"""9, reload: an engine has proven a version, or it never gets traffic."""

from __future__ import annotations

import time

from sqlalchemy import Connection, func, or_, update

from shared.ledger.tables import versions


def serve_version(connection: Connection, version: int) -> None:
    """An engine has proven that it serves this version: SERVING; the one before is RETIRED."""
    connection.execute(
        update(versions).where(versions.c.state == "SERVING", versions.c.version != version).values(state="RETIRED")
    )
    connection.execute(
        update(versions)
        .where(versions.c.version == version, or_(versions.c.state == "PUBLISHED", versions.c.state == "RETIRED"))
        .values(state="SERVING", served_at=func.coalesce(versions.c.served_at, time.time()))
    )
    connection.execute(
        update(versions).where(versions.c.version < version, versions.c.state == "PUBLISHED").values(state="RETIRED")
    )


def reject_version(connection: Connection, version: int, reason: str) -> None:
    """A version's folder is damaged, or no engine reproduces its probe: it never gets traffic."""
    connection.execute(
        update(versions)
        .where(versions.c.version == version, versions.c.state.in_(("PUBLISHED", "SERVING", "RETIRED")))
        .values(state="REJECTED", reason=reason[:2000])
    )
