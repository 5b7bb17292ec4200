"""2, record: store samples as rows, RECORDED or, with a reason, DISCARDED; link turns to their conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, update

from shared.experience import Sample, Sampling, State, choice_name
from shared.ledger.conditions import AnyRow, is_in
from shared.ledger.connect import COPY_ROWS, copy_rows, placeholder
from shared.ledger.prefix import share_prefix
from shared.ledger.queries.rows import Alike, find_alike
from shared.ledger.tables import experiences, payloads, signals, versions
from shared.ledger.transitions.lineage import restore_lineage

Extends = tuple[bytes, ...]  # digests of exchanges that a chat may continue

_OF_SAMPLE = [field.name for field in fields(Sample) if field.name in experiences.c]
_OF_SAMPLING = [field.name for field in fields(Sampling)]
_COMPUTED = ("parent_id", "conversation_id", "state", "reason", "n_prompt", "n_reply")
_ROW = (*_OF_SAMPLE, *_OF_SAMPLING, *_COMPUTED)
_PAYLOAD = ("tokens", "request", "reply", "prefix_of")
_of_sample, _of_sampling = attrgetter(*_OF_SAMPLE), attrgetter(*_OF_SAMPLING)
_RECORDED, _DISCARDED = State.RECORDED.value, State.DISCARDED.value


def record(connection: Connection, samples: Sequence[Sample], *, waits: bool = True) -> None:
    """Store samples. One that must not be trained on is stored as DISCARDED with its reason.

    waits: for other transactions that choose among equal exchanges which one a turn continues. Without, for an import,
    which would make chats wait. Raises sqlalchemy.exc.IntegrityError if a message id with that choice exists already.
    """
    for turns in _split_conversations(samples):
        _record(connection, turns, waits)


def _split_conversations(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    """Split samples so that an exchange is stored before the turn that continues it.

    Both may be written together: a caller may continue a stream whose row is not stored yet.
    """
    begin, exchanges = 0, set[bytes | None]()
    for at, sample in enumerate(samples):
        if not exchanges.isdisjoint(sample.extends):
            yield samples[begin:at]
            begin, exchanges = at, set()
        exchanges.add(sample.exchange)
    if samples:
        yield samples[begin:]


def _record(connection: Connection, samples: Sequence[Sample], waits: bool) -> None:
    parents = _find_parents(connection, samples, waits)
    rows = [_row(*of) for of in zip(samples, parents, strict=True)]
    continued = [None if parent is None else parent.id for parent in parents]
    # before tokens are locked: those who delete rows lock them in this order
    _name_conversations(connection, [parent for parent in parents if parent is not None])
    stored = share_prefix(connection, list(zip((s.tokens for s in samples), continued, strict=True)))
    texts = [
        (tokens.encode(), s.request, s.reply, prefix_of, s.msg_id, s.choice)
        for s, (tokens, prefix_of) in zip(samples, stored, strict=True)
    ]
    if connection.dialect.name == "postgresql" and len(samples) >= COPY_ROWS:
        _copy(connection, rows, texts)
    else:
        insert_row, insert_payload = _INSERTS[placeholder(connection)]
        one = len(samples) == 1
        connection.exec_driver_sql(insert_row, rows[0] if one else rows)
        connection.exec_driver_sql(insert_payload, texts[0] if one else texts)


def lock_imports(connection: Connection) -> None:
    """Wait for the transaction of another import, which may record the same messages."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(732161)")


def restore_trained(
    connection: Connection,
    msg_id: str,
    choice: int,
    *,
    lessons: int,
    manifest_sha256: str,
    trained_by: Mapping[str, bool],
) -> None:
    """RECORDED → CONSUMED for an imported row, with its signals, that a version of this ledger was trained on.

    lessons: those that it was trained on. manifest_sha256: of the first version that contains it. trained_by: all
    versions that were trained on it, by the SHA-256 of their manifests, each with the value of `lineage.consumed`.
    """
    version = select(versions.c.version).where(versions.c.manifest_sha256 == manifest_sha256).scalar_subquery()
    of_row = (signals.c.msg_id == msg_id, signals.c.choice == choice)
    last_signal = select(func.coalesce(func.max(signals.c.id), 0)).where(*of_row).scalar_subquery()
    trained = {"state": State.CONSUMED, "consumed_version": version, "taught": lessons, "last_signal": last_signal}
    teaches = experiences.c.teaches.bitwise_and(~lessons)
    mine = (experiences.c.msg_id == msg_id, experiences.c.choice == choice, version.is_not(None))
    recorded = is_in(experiences.c.state, State.RECORDED)
    changed = update(experiences).where(*mine, recorded).values(**trained, teaches=teaches)
    for row_id in connection.execute(changed.returning(experiences.c.id)).scalars().all():
        restore_lineage(connection, row_id, {**trained_by, manifest_sha256: True})


def restore_quarantine(connection: Connection, msg_id: str, choice: int, *, reason: str) -> None:
    """RECORDED or CONSUMED → DISCARDED for an imported row that was in quarantine when it left its ledger."""
    mine = (experiences.c.msg_id == msg_id, experiences.c.choice == choice)
    new = or_(is_in(experiences.c.state, State.RECORDED), is_in(experiences.c.state, State.CONSUMED))
    connection.execute(update(experiences).where(*mine, new).values(state=State.DISCARDED, reason=reason))


def _row(sample: Sample, parent: AnyRow | None) -> tuple[Any, ...]:
    """Return the values of _ROW."""
    parent_id = None if parent is None else choice_name(parent.msg_id, parent.choice)
    computed = (
        parent_id,
        None if parent is None else parent.conversation_id or parent_id,
        _DISCARDED if sample.quarantine else _RECORDED,
        f"quarantined: {sample.quarantine}" if sample.quarantine else None,
        len(sample.tokens.prompt_ids),
        len(sample.tokens.reply_ids),
    )
    return (*_of_sample(sample), *_of_sampling(sample.sampling), *computed)


def _copy(connection: Connection, rows: Sequence[tuple[Any, ...]], texts: Sequence[tuple[Any, ...]]) -> None:
    """Insert many rows and their payloads by COPY."""
    fresh = "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)"
    ids = sorted(connection.exec_driver_sql(fresh, (experiences.name, len(rows))).scalars())
    of_rows = ((row_id, *row) for row_id, row in zip(ids, rows, strict=True))
    copy_rows(connection, f"COPY {experiences.name} (id, {', '.join(_ROW)}) FROM STDIN", of_rows)
    of_texts = ((row_id, *row[: len(_PAYLOAD)]) for row_id, row in zip(ids, texts, strict=True))
    copy_rows(connection, f"COPY {payloads.name} (experience_id, {', '.join(_PAYLOAD)}) FROM STDIN", of_texts)


def _name_conversations(connection: Connection, parents: Sequence[AnyRow]) -> None:
    """Name the conversations of parents that had no other turn until now."""
    alone = {row.id: choice_name(row.msg_id, row.choice) for row in parents if row.conversation_id is None}
    for row_id, name in sorted(alone.items()):  # in the order in which feedback locks rows
        mine = and_(experiences.c.id == row_id, experiences.c.conversation_id.is_(None))
        connection.execute(update(experiences).where(mine).values(conversation_id=name))


def _find_parents(connection: Connection, samples: Sequence[Sample], waits: bool) -> list[AnyRow | None]:
    """Return the exchange that each sample continues: the longest; among equal ones, one without a next turn."""
    asked = {sample.extends for sample in samples if sample.extends}
    found = {extends: find_alike(connection, extends) for extends in asked}
    if waits and connection.dialect.name == "postgresql":
        found |= _find_again(connection, found)
    chosen: dict[str, AnyRow | None] = {}  # by message: its choices continue the same one
    for sample in samples:
        if sample.msg_id not in chosen:
            chosen[sample.msg_id] = found[sample.extends].continue_one() if sample.extends else None
    return [chosen[sample.msg_id] for sample in samples]


def _find_again(connection: Connection, found: Mapping[Extends, Alike]) -> dict[Extends, Alike]:
    """Find equal exchanges again, once no other transaction chooses among them."""
    several = {extends: alike for extends, alike in found.items() if len(alike.rows) > 1}
    for exchange in sorted({alike.exchange for alike in several.values()}):  # in one order, as other transactions
        key = int.from_bytes(exchange[:8], "big", signed=True)
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (key,))
    return {extends: find_alike(connection, extends) for extends in several}


def _insert_statements(mark: str) -> tuple[str, str]:
    """Return a sample's two inserts as driver statements: SQLAlchemy's insert() takes longer than the storing."""
    marks = ", ".join([mark] * len(_ROW))
    return (
        f"INSERT INTO {experiences.name} ({', '.join(_ROW)}) VALUES ({marks})",
        f"INSERT INTO {payloads.name} (experience_id, {', '.join(_PAYLOAD)})"
        f" SELECT id, {mark}, {mark}, {mark}, {mark} FROM {experiences.name} WHERE msg_id = {mark} AND choice = {mark}",
    )


_INSERTS = {mark: _insert_statements(mark) for mark in ("?", "%s")}
