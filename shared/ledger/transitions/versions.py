"""8 and 9: all changes of a version's state, each with a row in `decisions`.

    reserve → RESERVED → publish → PUBLISHED → serve → SERVING → retire → RETIRED → serve …
    PUBLISHED → skip → SKIPPED → serve …, or an operator wants it to serve → PUBLISHED
    PUBLISHED, and proven → an operator ends its share of the chats → RETIRED
    any but RESERVED and FAILED → reject → REJECTED; if its trainer or an operator withdraws it, also FAILED → REJECTED
    PUBLISHED or SKIPPED, and never proven → fail → FAILED → retry → PUBLISHED

A transition is one statement that requires its source states. If it does not apply, it changes nothing and returns
False. `by` is who decided: a trainer, an engine, an operator.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from shared.experience import MAY_SERVE, Purpose, VersionState
from shared.ledger.connect import database_time, insert_into, lock_rows
from shared.ledger.queries.versions import PINNABLE
from shared.ledger.tables import decisions, engines, load_failures, version_leases, versions
from shared.versions import version_path

_MAY_COME_INTO_SERVICE = (VersionState.PUBLISHED, VersionState.SKIPPED, VersionState.RETIRED)
_UNPROVEN = and_(versions.c.state.in_((VersionState.PUBLISHED, VersionState.SKIPPED)), versions.c.served_at.is_(None))
_MAY_BE_REJECTED = versions.c.state.in_((*MAY_SERVE, VersionState.SKIPPED))
_MAY_BE_WITHDRAWN = or_(_MAY_BE_REJECTED, versions.c.state == VersionState.FAILED)  # a FAILED one could be retried


def reserve_version(connection: Connection, *, writer: str) -> int:
    """Reserve a version number for this trainer until it publishes it; the trainer writes nothing before that.

    The row's kind and step are set when it is published. Returns a number again that it reserved before and did not
    publish, because it died.
    """
    own = (versions.c.writer == writer, versions.c.state == VersionState.RESERVED)
    held: int | None = connection.execute(select(func.min(versions.c.version)).where(*own)).scalar()
    if held is not None:
        return held
    while True:
        highest = connection.execute(select(func.max(versions.c.version))).scalar()
        version: int = 0 if highest is None else highest + 1
        now = database_time(connection)
        row = {"version": version, "kind": "full", "path": version_path(version), "step": 0, "created_at": now}
        state = {"state": VersionState.RESERVED, "decided_at": now, "writer": writer}
        made = insert_into(connection, versions).values(**row, **state).returning(versions.c.version)
        if connection.execute(made.on_conflict_do_nothing()).first() is not None:  # else another trainer inserted it
            _note(connection, version, VersionState.RESERVED, None, writer)
            return version


def publish_version(connection: Connection, version: int, *, by: str, writer: str | None, **columns: Any) -> None:
    """RESERVED → PUBLISHED for the number that `writer` reserved; a free number is inserted.

    columns: parent, kind, step, manifest_sha256, bytes. Raises IntegrityError if the number belongs to another writer.
    """
    now = database_time(connection)
    columns |= {"state": VersionState.PUBLISHED, "created_at": now, "decided_at": now, "writer": writer}
    own = (versions.c.version == version, versions.c.state == VersionState.RESERVED, versions.c.writer == writer)
    if not connection.execute(update(versions).where(*own).values(**columns)).rowcount:
        connection.execute(insert(versions).values(version=version, path=version_path(version), **columns))
    _note(connection, version, VersionState.PUBLISHED, None, by)


def serve_version(connection: Connection, version: int, *, by: str, engine: str | None = None) -> bool:
    """PUBLISHED, SKIPPED or RETIRED → SERVING: an engine has proven that it serves it. Returns whether it is SERVING.

    Versions that served before are RETIRED if no engine holds them; older versions that never served are SKIPPED,
    except the base, which engines start on and return to.
    engine: url of the engine; its row in the ledger may still name its previous version, and its leases for loading are
    released.
    """
    served_at = func.coalesce(versions.c.served_at, database_time(connection))
    may = and_(versions.c.state.in_(_MAY_COME_INTO_SERVICE), versions.c.deleted_at.is_(None))
    here = versions.c.version == version
    kept = versions.c.deleted_at.is_(None)
    others = and_(kept, versions.c.state == VersionState.SERVING, versions.c.version != version)
    overtaken = and_(kept, versions.c.version.between(1, version - 1), versions.c.state == VersionState.PUBLISHED)
    lock_rows(connection, versions.c.version, or_(here, others, overtaken))
    if not _move(connection, and_(here, may), VersionState.SERVING, by=by, served_at=served_at):
        serving = select(versions.c.version).where(here, versions.c.state == VersionState.SERVING)
        if connection.execute(serving).first() is None:
            return False
    _move(connection, and_(others, ~is_held(connection, but=engine)), VersionState.RETIRED, by=by)
    overtaken = and_(overtaken, versions.c.share.is_(None))
    _move(connection, overtaken, VersionState.SKIPPED, by=by, reason=f"version {version} served before it did")
    loaded = (version_leases.c.reader == engine, version_leases.c.purpose == Purpose.LOADING)
    connection.execute(delete(version_leases).where(*loaded))
    return True


def prove_version(connection: Connection, version: int) -> bool:
    """Store that an engine has proven a version that it serves besides the newest one. Its state stays.

    Returns False if the version was rejected, failed or given up.
    """
    there = (versions.c.version == version, versions.c.state.in_(PINNABLE), versions.c.deleted_at.is_(None))
    served_at = func.coalesce(versions.c.served_at, database_time(connection))
    return connection.execute(update(versions).where(*there).values(served_at=served_at)).rowcount == 1


def is_held(connection: Connection, but: str | None = None) -> ColumnElement[bool]:
    """Whether the row of an engine that an explorer owns names the version; but: ignore this engine."""
    owned = (engines.c.owner.is_not(None), engines.c.owner_until >= database_time(connection))
    holds = [engines.c.version == versions.c.version, *owned]
    if but is not None:
        holds.append(engines.c.url != but)
    return select(engines.c.url).where(*holds).exists()


def skip_version(connection: Connection, version: int, reason: str, *, by: str) -> bool:
    """PUBLISHED → SKIPPED: a newer version replaces it before any engine has proven it."""
    waiting = and_(versions.c.version == version, versions.c.state == VersionState.PUBLISHED)
    return bool(_move(connection, waiting, VersionState.SKIPPED, by=by, reason=reason))


def restore_skipped(connection: Connection, numbers: Collection[int], *, by: str) -> None:
    """SKIPPED → PUBLISHED: an operator wants these versions to serve."""
    skipped = and_(versions.c.version.in_(numbers), versions.c.state == VersionState.SKIPPED)
    _move(connection, skipped, VersionState.PUBLISHED, by=by)


def retire_shared(connection: Connection, numbers: Collection[int], *, by: str) -> None:
    """PUBLISHED → RETIRED for those of these versions that an engine has proven: an operator has ended their shares."""
    proven = and_(versions.c.state == VersionState.PUBLISHED, versions.c.served_at.is_not(None))
    _move(connection, and_(versions.c.version.in_(numbers), proven), VersionState.RETIRED, by=by)


def reject_version(connection: Connection, version: int, reason: str, *, by: str, only_unproven: bool = False) -> bool:
    """→ REJECTED: its folder is damaged, or a working engine does not reproduce its probe.

    only_unproven: not if an engine has proven it; then the other engine is at fault.
    """
    sources = _UNPROVEN if only_unproven else _MAY_BE_REJECTED
    here = and_(versions.c.version == version, sources)
    return bool(_move(connection, here, VersionState.REJECTED, by=by, reason=reason))


def withdraw_versions(connection: Connection, *, writer: str, after: int) -> bool:
    """→ REJECTED for a trainer's versions that its saved state does not contain. Returns whether there were any.

    after: the newest version in that state. The rows of the rejected versions are trained on again.
    """
    own = and_(versions.c.writer == writer, versions.c.version > after, _MAY_BE_WITHDRAWN)
    lock_rows(connection, versions.c.version, own)
    reason = f"its trainer went back to version {after}, the last one whose state it saved"
    return bool(_move(connection, own, VersionState.REJECTED, by=writer, reason=reason))


def reject_versions_after(connection: Connection, version: int, reason: str, *, by: str) -> list[int]:
    """→ REJECTED for all later versions, whoever wrote them. Returns their numbers."""
    later = and_(versions.c.version > version, _MAY_BE_WITHDRAWN)
    return _move(connection, later, VersionState.REJECTED, by=by, reason=reason)


def fail_version(connection: Connection, version: int, reason: str, *, by: str) -> bool:
    """PUBLISHED or SKIPPED → FAILED if no engine has proven it: engines crashed or hung on it."""
    unproven = and_(versions.c.version == version, _UNPROVEN)
    return bool(_move(connection, unproven, VersionState.FAILED, by=by, reason=reason))


def retry_version(connection: Connection, version: int, *, by: str) -> bool:
    """FAILED → PUBLISHED: engines may try it again, as often as a new version."""
    failed = and_(versions.c.state == VersionState.FAILED, versions.c.deleted_at.is_(None))
    if not _move(connection, and_(versions.c.version == version, failed), VersionState.PUBLISHED, by=by):
        return False
    connection.execute(delete(load_failures).where(load_failures.c.version == version))
    return True


def _move(
    connection: Connection,
    which: ColumnElement[bool],
    to: VersionState,
    *,
    by: str,
    reason: str | None = None,
    **columns: Any,
) -> list[int]:
    """Change the state of the versions that meet the condition. Returns their numbers."""
    reason = None if reason is None else reason[:2000]
    columns |= {"state": to, "reason": reason, "decided_at": database_time(connection)}
    moved = update(versions).where(which).values(**columns).returning(versions.c.version)
    numbers = sorted(connection.execute(moved).scalars())
    for number in numbers:
        _note(connection, number, to, reason, by)
    return numbers


def note_decision(connection: Connection, version: int, reason: str, *, by: str) -> None:
    """Append a decision about a version that leaves its state as it is. The version's row is locked."""
    state: VersionState = connection.execute(select(versions.c.state).where(versions.c.version == version)).scalar_one()
    _note(connection, version, state, reason, by)


def _note(connection: Connection, version: int, to: VersionState, reason: str | None, by: str) -> None:
    """Append a decision. Its source state is the target of the previous one: `versions` is locked here."""
    before = select(decisions.c.to_state).where(decisions.c.version == version).order_by(decisions.c.id.desc()).limit(1)
    row = {"version": version, "from_state": before.scalar_subquery(), "to_state": to, "reason": reason}
    connection.execute(insert(decisions).values(**row, decided_by=by, decided_at=database_time(connection)))
