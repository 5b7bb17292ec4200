"""2, record: samples become rows, RECORDED or, with a reason, DISCARDED; turns are linked to their conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, select, update

from shared.experience import Sample
from shared.ledger.connect import DriverCursor, driver_mark
from shared.ledger.prefix import split_off
from shared.ledger.tables import experiences, payloads
from shared.ledger.transitions.rows import AnyRow, choice_name

_MANY = 16  # rows, from which on PostgreSQL's COPY is the quicker way
_MAX_ALIKE = 32  # exchanges that say the same, newest first, among which a parent is chosen


def record(connection: Connection, samples: Sequence[Sample]) -> None:
    """Store samples. One that must not be trained on is stored as DISCARDED with its reason.

    Raises sqlalchemy.exc.IntegrityError when a message id with that choice exists already.
    """
    if not samples:
        return
    parents = [_find_parent(connection, sample.extends) if sample.extends else None for sample in samples]
    rows = [_experience_row(*of) for of in zip(samples, parents, strict=True)]
    continued = [None if parent is None else parent.id for parent in parents]
    kept = split_off(connection, list(zip((s.tokens for s in samples), continued, strict=True)))
    texts = [
        (tokens.encode(), s.request, s.reply, prefix_of, s.msg_id, s.choice)
        for s, (tokens, prefix_of) in zip(samples, kept, strict=True)
    ]
    if connection.dialect.name == "postgresql" and len(samples) >= _MANY:
        _copy(connection, rows, texts)
    else:
        insert_row, insert_payload = _INSERTS[driver_mark(connection)]
        with DriverCursor(connection) as cursor:
            cursor.execute_each(insert_row, rows)
            cursor.execute_each(insert_payload, texts)
    _name_conversations(connection, [parent for parent in parents if parent is not None])


def _insert_statements(mark: str) -> tuple[str, str]:
    """A sample's two inserts as the driver takes them: on chat's hot path building them costs more than storing."""
    names = ", ".join(_ROW)
    marks = ", ".join([mark] * len(_ROW))
    return (
        f"INSERT INTO {experiences.name} ({names}) VALUES ({marks})",
        f"INSERT INTO {payloads.name} (experience_id, {', '.join(_PAYLOAD)})"
        f" SELECT id, {mark}, {mark}, {mark}, {mark} FROM {experiences.name} WHERE msg_id = {mark} AND choice = {mark}",
    )


def _copy(connection: Connection, rows: Sequence[tuple[Any, ...]], texts: Sequence[tuple[Any, ...]]) -> None:
    """What the two inserts do, by COPY: for 64 rows half the driver's work, for one more than theirs."""
    fresh = "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)"
    ids = sorted(connection.exec_driver_sql(fresh, (experiences.name, len(rows))).scalars())
    with DriverCursor(connection) as cursor:
        of_rows = ((row_id, *row) for row_id, row in zip(ids, rows, strict=True))
        cursor.copy_rows(f"COPY {experiences.name} (id, {', '.join(_ROW)}) FROM STDIN", of_rows)
        of_texts = ((row_id, *row[: len(_PAYLOAD)]) for row_id, row in zip(ids, texts, strict=True))
        cursor.copy_rows(f"COPY {payloads.name} (experience_id, {', '.join(_PAYLOAD)}) FROM STDIN", of_texts)


def _name_conversations(connection: Connection, parents: Sequence[AnyRow]) -> None:
    """What stood alone has another turn now, and begins a conversation of its own name."""
    alone = {row.id: choice_name(row.msg_id, row.choice) for row in parents if row.conversation_id is None}
    for row_id, name in sorted(alone.items()):  # in the order in which feedback locks rows
        mine = and_(experiences.c.id == row_id, experiences.c.conversation_id.is_(None))
        connection.execute(update(experiences).where(mine).values(conversation_id=name))


def _find_parent(connection: Connection, extends: Sequence[bytes]) -> AnyRow | None:
    """The exchange that a request continues: the longest; of several alike, one that nobody has continued yet."""
    alike = _ALIKE[driver_mark(connection)]
    for exchange in extends:
        rows = connection.exec_driver_sql(alike, (exchange,)).all()
        if len(rows) == 1:
            return rows[0]
        if rows:
            names = [choice_name(row.msg_id, row.choice) for row in rows]
            continued = select(experiences.c.parent_id).where(experiences.c.parent_id.in_(names))
            counts = Counter(connection.execute(continued).scalars())
            chosen: AnyRow = min(reversed(rows), key=lambda row: counts[choice_name(row.msg_id, row.choice)])
            return chosen
    return None


_ROW = (
    "msg_id", "choice", "parent_id", "conversation_id", "exchange", "task_id", "run_id", "key_name", "key_group",
    "version", "version_end", "state", "reason", "n_prompt", "n_reply", "temperature", "top_p", "top_k", "min_p",
    "finish_reason", "latency_s", "created_at",
)  # fmt: skip
_PAYLOAD = ("tokens", "request", "reply", "prefix_of")


def _experience_row(sample: Sample, parent: AnyRow | None) -> tuple[Any, ...]:
    """The values of _ROW."""
    parent_name = None if parent is None else choice_name(parent.msg_id, parent.choice)
    return (
        sample.msg_id,
        sample.choice,
        parent_name,
        None if parent is None else parent.conversation_id or parent_name,
        sample.exchange,
        sample.task_id,
        sample.run_id,
        sample.key_name,
        sample.key_group,
        sample.version,
        sample.version_end,
        "DISCARDED" if sample.quarantine else "RECORDED",
        f"quarantined: {sample.quarantine}" if sample.quarantine else None,
        len(sample.tokens.prompt_ids),
        len(sample.tokens.reply_ids),
        sample.sampling.temperature,
        sample.sampling.top_p,
        sample.sampling.top_k,
        sample.sampling.min_p,
        sample.finish_reason,
        sample.latency_s,
        sample.created_at,
    )


_ALIKE = {
    mark: f"SELECT id, msg_id, choice, conversation_id FROM {experiences.name} WHERE exchange = {mark}"
    f" ORDER BY id DESC LIMIT {_MAX_ALIKE}"
    for mark in ("?", "%s")
}
_INSERTS = {mark: _insert_statements(mark) for mark in ("?", "%s")}
