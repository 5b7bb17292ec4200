"""8, publish: commit a version together with its trainer's state; its rows become CONSUMED."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, func, select, update

from shared.errors import LeaseLost
from shared.experience import BatchState, Purpose, State, VersionState
from shared.ledger.conditions import are_about, in_parts, is_in
from shared.ledger.connect import database_time, insert_into, lock_rows
from shared.ledger.queries.signals import load_signals
from shared.ledger.tables import batches, experiences, signals, trainer_states, trainers, versions
from shared.ledger.transitions.lineage import add_consumed, add_trained
from shared.ledger.transitions.retain import keep_base, lease_version, release_version
from shared.ledger.transitions.versions import publish_version
from shared.reward import EVERY_LESSON, WORDS, NewWords, lessons_of


def publish(
    connection: Connection,
    *,
    version: int,
    parent: int | None,
    kind: str,
    step: int,
    manifest_sha256: str | None = None,
    size: int | None = None,
    delta_of: int | None = None,
    trainer: str | None = None,
    batch_ids: Collection[int] = (),
    trained_on: Collection[int] = (),
    earlier: Mapping[int, Collection[int]] = MappingProxyType({}),
    state_path: str | None = None,
    state_sha256: str | None = None,
    stats: dict[str, float] | None = None,
) -> None:
    """Commit a version: its row, CONSUMED for its batches, and the trainer's state that contains them.

    size: of the version's files in bytes. delta_of: the version whose files it needs, which are kept as long as its
    own. trained_on: ids of rows in its updates, also of those that are in none of its batches. earlier: see
    `record_state`.

    After a crash, either all of it is stored or nothing. A repeat changes nothing, for a trainer that lost the answer
    to the first attempt. Raises LeaseLost if this trainer no longer has the lease of a batch.
    """
    if trainer is not None and _is_official(connection, trainer, version, state_path):
        return
    about = {"parent": parent, "kind": kind, "step": step, "manifest_sha256": manifest_sha256, "bytes": size}
    publish_version(connection, version, by=trainer or "the base model", writer=trainer, **about)
    if delta_of is not None:
        keep_base(connection, delta_of, version)
    if trainer is not None:
        state = {"state_path": state_path, "state_sha256": state_sha256}
        contained = {**earlier, version: batch_ids}
        record_state(connection, trainer=trainer, version=version, step=step, contained=contained, stats=stats, **state)
        add_trained(connection, version, trained_on)


def publish_ahead(
    connection: Connection,
    *,
    version: int,
    trainer: str,
    size: int | None = None,
    delta_of: int | None = None,
    trained_on: Collection[int] = (),
    stats: dict[str, float] | None = None,
    **about: Any,
) -> None:
    """Commit a version that no saved state contains yet: its rows stay LEASED until `record_state` names it.

    Its files are kept for the trainer until then, because its next version descends from them. size, delta_of,
    trained_on: see `publish`. about: see `publish_version`. A repeat changes nothing.
    """
    state = connection.execute(select(versions.c.state).where(versions.c.version == version)).scalar()
    if state == VersionState.RESERVED:
        publish_version(connection, version, by=trainer, writer=trainer, bytes=size, **about)
        if delta_of is not None:
            keep_base(connection, delta_of, version)
        lease: dict[str, Any] = {"reader": trainer, "purpose": Purpose.PARENT}
        lease_version(connection, version, **lease, owner=trainer, lasts=True)
        release_version(connection, **lease, but=version)
        encoded = msgspec.json.encode(stats or {})
        connection.execute(update(trainers).where(trainers.c.name == trainer).values(stats=encoded))
        add_trained(connection, version, trained_on)


def record_state(
    connection: Connection,
    *,
    trainer: str,
    version: int,
    step: int,
    contained: Mapping[int, Collection[int]],
    state_path: str | None,
    state_sha256: str | None,
    stats: dict[str, float] | None = None,
) -> None:
    """Store the trainer's saved state, and CONSUMED for the rows in it.

    version: the newest one in it. contained: the batches of each version that no state contained before.
    A repeat changes nothing. Raises LeaseLost if this trainer no longer has the lease of a batch.
    """
    if _is_official(connection, trainer, version, state_path):
        return
    _lock_batches(connection, sorted({one for batch_ids in contained.values() for one in batch_ids}))
    for number, batch_ids in contained.items():
        _consume(connection, trainer, number, batch_ids)
    state = {"state_path": state_path, "state_sha256": state_sha256}
    if state_path is not None:
        _keep_state(connection, trainer=trainer, version=version, path=state_path, sha256=state_sha256, step=step)
    release_version(connection, reader=trainer, purpose=Purpose.PARENT)  # the trainer's row keeps its files now
    encoded = msgspec.json.encode(stats or {})
    _save_trainer(connection, name=trainer, step=step, version=version, **state, stats=encoded)


def _lock_batches(connection: Connection, ids: Sequence[int]) -> None:
    """Lock batches and then their rows. Feedback that was being stored is then in the log before the log is read."""
    if ids:
        lock_rows(connection, batches.c.id, batches.c.id.in_(ids))
        held = (experiences.c.batch_id.in_(ids), is_in(experiences.c.state, State.LEASED))
        lock_rows(connection, experiences.c.id, *held)


def _consume(connection: Connection, trainer: str, version: int, batch_ids: Collection[int]) -> None:
    mine = (batches.c.id.in_(batch_ids), batches.c.owner == trainer, is_in(batches.c.state, BatchState.LEASED))
    consumed = update(batches).where(*mine).values(state=BatchState.CONSUMED, consumed_version=version)
    held = connection.execute(consumed).rowcount
    if held != len(batch_ids):
        raise LeaseLost(f"{len(batch_ids) - held} of {len(batch_ids)} batches are no longer leased to {trainer!r}")
    acts, taught, teaches = experiences.c.acts, experiences.c.taught, experiences.c.teaches
    acted = {"taught": taught.bitwise_or(acts), "teaches": teaches.bitwise_and(acts.bitwise_not())}
    rows = (experiences.c.batch_id.in_(batch_ids), is_in(experiences.c.state, State.LEASED))
    later = _words_since(connection, rows)
    last_signal = select(batches.c.last_signal).where(batches.c.id == experiences.c.batch_id).scalar_subquery()
    first = func.coalesce(experiences.c.consumed_version, version)
    blameless = {"failures": 0, "deaths": 0}  # the state contains an update with them
    values = {"state": State.CONSUMED, "consumed_version": first, "last_signal": last_signal, **acted, **blameless}
    add_consumed(connection, version, rows)
    connection.execute(update(experiences).where(*rows).values(values))
    for lessons, ids in later.items():
        for part in in_parts(experiences.c.id, ids):
            connection.execute(update(experiences).where(part).values(teaches=teaches.bitwise_or(lessons)))


def _words_since(connection: Connection, held: Sequence[ColumnElement[bool]]) -> dict[int, list[int]]:
    """Return rows with new words since they were claimed, of a kind that acts in their batch: ids by Lesson.

    Words about an erased row never act.
    """
    since = and_(batches.c.id == experiences.c.batch_id, signals.c.id > batches.c.last_signal)
    columns = (*(experiences.c[name] for name in ("id", "msg_id", "choice", "acts")), batches.c.last_signal)
    query = select(*columns).distinct().join_from(experiences, signals, are_about()).join(batches, since)
    of_words = (signals.c.kind.in_(sorted(WORDS)), experiences.c.taught != EVERY_LESSON)
    rows = connection.execute(query.where(*held, *of_words)).all()
    log = load_signals(connection, rows, WORDS)
    by_lessons: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        words = NewWords(row.acts, row.last_signal)
        new = [one.kind for one in log[row.msg_id, row.choice] if words.has(one)]
        if lessons := lessons_of(new) & row.acts:
            by_lessons[lessons].append(row.id)
    return by_lessons


def _is_official(connection: Connection, trainer: str, version: int, state_path: str | None) -> bool:
    """Whether the trainer's row already contains this version with this state."""
    saved = select(trainers.c.version, trainers.c.state_path).where(trainers.c.name == trainer)
    row = connection.execute(saved).one_or_none()
    return row is not None and state_path is not None and tuple(row) == (version, state_path)


def begin_trainer(connection: Connection, *, name: str) -> None:
    """Store that a trainer starts. A new one stands at version 0, without a state, until `announce_trainer`."""
    lives = {"alive": True, "heartbeat_at": database_time(connection)}
    begun = insert_into(connection, trainers).values(name=name, step=0, version=0, **lives)
    connection.execute(begun.on_conflict_do_update(index_elements=[trainers.c.name], set_=lives))


def announce_trainer(
    connection: Connection,
    *,
    name: str,
    step: int,
    version: int,
    state_path: str | None,
    state_sha256: str | None,
    chosen: dict[str, Any] | None = None,
) -> None:
    """Store that a trainer has started, at this step and version, and release the files that it started from.

    chosen: its algorithms, if it chose them itself.
    """
    release_version(connection, reader=name, purpose=Purpose.PARENT)
    state = {"state_path": state_path, "state_sha256": state_sha256}
    encoded = None if chosen is None else msgspec.json.encode(chosen)
    _save_trainer(connection, name=name, step=step, version=version, **state, chosen=encoded)


def choose_algorithms(connection: Connection, *, name: str, chosen: dict[str, Any]) -> None:
    """Store the algorithms that a trainer uses from its next start."""
    encoded = msgspec.json.encode(chosen)
    connection.execute(update(trainers).where(trainers.c.name == name).values(chosen=encoded))


def report_trouble(connection: Connection, *, name: str, trouble: str | None) -> None:
    """Store why a trainer cannot publish; None: it can."""
    connection.execute(update(trainers).where(trainers.c.name == name).values(trouble=trouble))


def trip_breaker(connection: Connection, *, name: str, tripped: dict[str, Any]) -> None:
    """Stop a trainer from publishing until an operator resumes it. tripped: the figure, its bound and the fix."""
    encoded = msgspec.json.encode(tripped)
    connection.execute(update(trainers).where(trainers.c.name == name).values(tripped=encoded))


def reset_breaker(connection: Connection, *, name: str) -> bool:
    """Resume a trainer whose breaker has tripped; it compares rewards from the next version on.

    Returns whether its breaker had tripped.
    """
    newest = select(func.max(versions.c.version)).where(versions.c.state != VersionState.RESERVED).scalar_subquery()
    tripped = (trainers.c.name == name, trainers.c.tripped.is_not(None))
    changed = connection.execute(update(trainers).where(*tripped).values(tripped=None, resumed_version=newest))
    return bool(changed.rowcount)


def dismiss_trainer(connection: Connection, *, name: str) -> None:
    """Store that a trainer has stopped regularly."""
    connection.execute(update(trainers).where(trainers.c.name == name).values(alive=False))


def _keep_state(connection: Connection, **row: Any) -> None:
    key = [trainer_states.c.trainer, trainer_states.c.version]
    kept = insert_into(connection, trainer_states).values(row)
    connection.execute(kept.on_conflict_do_update(index_elements=key, set_=row))


def _save_trainer(connection: Connection, *, name: str, **columns: Any) -> None:
    columns |= {"alive": True, "heartbeat_at": database_time(connection), "trouble": None}
    statement = insert_into(connection, trainers).values(name=name, **columns)
    connection.execute(statement.on_conflict_do_update(index_elements=[trainers.c.name], set_=columns))
