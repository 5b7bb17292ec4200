"""Which versions keep their files: leases of their readers, tags, and the order of deletion.

A reader gets its lease before the files are given up, or does not get it: both lock the version's row, and then its
leases. The trainer deletes given-up files afterwards (trainer_service/janitor.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import Connection, Float, String, and_, delete, literal, or_, select, update

from shared.experience import Purpose, VersionState
from shared.ledger.conditions import in_parts
from shared.ledger.connect import database_time, insert_into, lock_rows
from shared.ledger.queries.trainers import StateRow, list_states
from shared.ledger.queries.versions import VersionRow, kept_versions
from shared.ledger.tables import trainer_states, trainers, version_leases, versions
from shared.ledger.transitions.leases import acquire_lease, release_lease
from shared.ledger.transitions.versions import is_held, skip_version
from shared.process import is_gone, is_running

VERSION_LEASE_S = 60.0  # lifetime of a reader's lease without renewal
_JANITOR = "janitor"
_OUT_OF_USE = (VersionState.SKIPPED, VersionState.REJECTED, VersionState.FAILED)


def lease_version(
    connection: Connection,
    version: int,
    *,
    reader: str,
    purpose: Purpose,
    owner: str,
    lasts: bool = False,
    lasts_s: float = VERSION_LEASE_S,
) -> bool:
    """Lease a version's files to a reader, or extend its lease. Returns False if they are given up or deleted.

    reader: such as an engine's url. owner: the process that renews the lease. lasts: without an end.
    """
    until = math.inf if lasts else database_time(connection) + lasts_s
    values = {"reader": literal(reader, String), "purpose": literal(purpose, String), "owner": literal(owner, String)}
    columns = [versions.c.version, *values.values(), literal(until, Float)]
    there = select(*columns).where(versions.c.version == version, versions.c.deleted_at.is_(None))
    taken = insert_into(connection, version_leases).from_select(
        ["version", *values, "until"], there.with_for_update(read=True, of=versions)
    )
    key = [version_leases.c.version, version_leases.c.reader, version_leases.c.purpose]
    taken = taken.on_conflict_do_update(index_elements=key, set_={"owner": owner, "until": until})
    return connection.execute(taken.returning(version_leases.c.version)).first() is not None


def keep_base(connection: Connection, base: int, delta: int) -> None:
    """Keep the files of a version as long as those of a delta of it."""
    reader = _delta(delta)
    lease_version(connection, base, reader=reader, purpose=Purpose.DELTA_BASE, owner=reader, lasts=True)


def release_version(connection: Connection, *, reader: str, purpose: Purpose, but: int | None = None) -> None:
    """Release a reader's leases for this purpose on all versions; but: except this one."""
    ended = [version_leases.c.reader == reader, version_leases.c.purpose == purpose]
    if but is not None:
        ended.append(version_leases.c.version != but)
    connection.execute(delete(version_leases).where(*ended))


def renew_version_leases(connection: Connection, owner: str, now: float) -> None:
    """Extend all leases on versions of this owner, except pins, which end some time after their last use."""
    until = now + VERSION_LEASE_S
    pinned = version_leases.c.purpose == Purpose.PINNED
    own = (version_leases.c.owner == owner, version_leases.c.until < until, ~pinned)
    connection.execute(update(version_leases).where(*own).values(until=until))


def release_version_leases(connection: Connection, owner: str) -> None:
    """Release the leases of an owner that has ended, and of all its readers."""
    connection.execute(delete(version_leases).where(version_leases.c.owner == owner))


def tag_version(connection: Connection, version: int, tag: str) -> bool:
    """Give a version a tag, which keeps its files, and remove it from any other. Returns False if it has no files."""
    lock_rows(connection, versions.c.version, or_(versions.c.version == version, versions.c.tag == tag))
    there = (versions.c.version == version, versions.c.deleted_at.is_(None), versions.c.state != VersionState.RESERVED)
    if not connection.execute(update(versions).where(*there).values(tag=tag)).rowcount:
        return False
    connection.execute(update(versions).where(versions.c.tag == tag, versions.c.version != version).values(tag=None))
    return True


def untag_version(connection: Connection, version: int) -> bool:
    """Remove a version's tag. Returns False if it had none."""
    tagged = (versions.c.version == version, versions.c.tag.is_not(None))
    return connection.execute(update(versions).where(*tagged).values(tag=None)).rowcount == 1


def give_up_files(
    connection: Connection, *, owner: str, max_versions: int, max_bytes: float, sizes: Mapping[int, int], by: str
) -> list[int]:
    """Give up the files of superfluous versions. Returns their numbers.

    The order: versions out of use, then versions that have served, then versions superseded before an engine loaded
    them; each oldest first. owner: this process; only one at a time decides.
    sizes: bytes, by version, of versions whose rows lack it.
    """
    if not acquire_lease(connection, _JANITOR, owner):
        return []
    rows = [row for row in kept_versions(connection) if row.has_files]
    bytes_of = {row.version: row.bytes if row.bytes is not None else sizes.get(row.version, 0) for row in rows}
    given_up: list[int] = []
    groups = list(_in_order(rows)) if len(bytes_of) > max_versions or sum(bytes_of.values()) > max_bytes else []
    numbers = [row.version for group in groups for row in group]
    lock_rows(connection, versions.c.version, versions.c.version.in_(numbers))
    _end_leases(connection)
    for group in groups:
        candidates: dict[int | None, VersionRow] = {row.version: row for row in group}
        for oldest in group:
            row: VersionRow | None = oldest
            while row is not None and (len(bytes_of) > max_versions or sum(bytes_of.values()) > max_bytes):
                if not _give_up(connection, row, by):
                    break  # it is in use
                given_up.append(row.version)
                del bytes_of[row.version], candidates[row.version]
                row = candidates.get(row.parent)  # refused before if this version was a delta of it
    release_lease(connection, _JANITOR, owner)
    return given_up


def _in_order(rows: list[VersionRow]) -> Iterator[list[VersionRow]]:
    """Yield the versions that may be given up, in order: groups, each oldest first."""
    rows = [row for row in rows if row.version != 0]
    yield [row for row in rows if row.state in _OUT_OF_USE]
    yield [row for row in rows if row.state == VersionState.RETIRED][:-1]  # engines return to the newest
    yield [row for row in rows if row.state == VersionState.PUBLISHED][:-1]  # engines load the newest


def _give_up(connection: Connection, row: VersionRow, by: str) -> bool:
    """Give up a version's files. Returns False if it is in use. Its row is locked, so that no lease is missed."""
    unused = [
        versions.c.version == row.version,
        versions.c.state == row.state,
        versions.c.tag.is_(None),
        versions.c.share.is_(None),
        versions.c.deleted_at.is_(None),
        ~select(version_leases.c.version).where(version_leases.c.version == versions.c.version).exists(),
        ~select(trainers.c.name).where(trainers.c.version == versions.c.version).exists(),
        ~is_held(connection),
    ]
    given_up = update(versions).where(and_(*unused)).values(deleted_at=database_time(connection))
    if not connection.execute(given_up).rowcount:
        return False
    release_version(connection, reader=_delta(row.version), purpose=Purpose.DELTA_BASE)
    if row.state == VersionState.PUBLISHED:
        skip_version(connection, row.version, "overtaken before an engine took it up (versions.max_versions)", by=by)
    return True


def _delta(version: int) -> str:
    """Return the name of a version as a reader of its base."""
    return f"version {version}"


def _end_leases(connection: Connection) -> None:
    """Delete leases that have expired, and those of processes that are known to be gone.

    A lease of a running process on this machine does not expire, except a pin, which is not renewed.
    """
    owners = connection.execute(select(version_leases.c.owner).distinct()).scalars().all()
    gone = [owner for owner in owners if is_gone(owner)]
    running = [owner for owner in owners if is_running(owner)]
    may_run_out = or_(version_leases.c.owner.not_in(running), version_leases.c.purpose == Purpose.PINNED)
    run_out = and_(version_leases.c.until < database_time(connection), may_run_out)
    connection.execute(delete(version_leases).where(or_(run_out, version_leases.c.owner.in_(gone))))


def forget_old_states(connection: Connection, *, trainer: str, current: str | None, keep: int) -> set[str]:
    """Forget all saved states but the newest `keep` of versions that have files and are not rejected.

    current: the path of the state that the trainer continues from, which is kept. So is the one that its row names,
    from which it starts again after a rollback. Returns the paths of the states that are kept.
    """
    row = select(trainers.c.state_path).where(trainers.c.name == trainer)
    named = connection.execute(row.with_for_update()).scalar()  # a rollback locks the row, too
    paths = {path for path in (current, named) if path is not None}
    states, rows = list_states(connection, trainer), kept_versions(connection)
    there = {one.version for one in rows if one.has_files and one.state != VersionState.REJECTED}
    paths |= {state.path for state in [one for one in states if one.version in there][-keep:]}
    forget_states(connection, trainer, [state.version for state in states if state.path not in paths])
    return paths


def unusable_states(connection: Connection, *, but: str) -> list[StateRow]:
    """Return the saved states of other trainers than `but` from which none can ever start.

    No rollback can name them, because the files of their versions are given up, and their trainers' rows do not. Only
    trainers that have ended regularly count: another one may hold a state that its row does not name since a rollback.
    """
    of_ended = and_(trainers.c.name == trainer_states.c.trainer, trainers.c.alive.is_(False), trainers.c.name != but)
    given_up = and_(versions.c.version == trainer_states.c.version, versions.c.deleted_at.is_not(None))
    unusable = select(trainer_states).join(trainers, of_ended).join(versions, given_up)
    unusable = unusable.where(trainers.c.state_path.is_distinct_from(trainer_states.c.path))
    rows = connection.execute(unusable.order_by(trainer_states.c.trainer, trainer_states.c.version))
    return [StateRow(**row._mapping) for row in rows]


def forget_states(connection: Connection, trainer: str, numbers: Sequence[int]) -> None:
    """Forget a trainer's saved states of these versions."""
    for part in in_parts(trainer_states.c.version, numbers):
        connection.execute(delete(trainer_states).where(part, trainer_states.c.trainer == trainer))
