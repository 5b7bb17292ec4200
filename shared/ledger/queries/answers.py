"""Finds stored answers of feedback: the one for an idempotency key, old ones, and those that name a message."""

from __future__ import annotations

from collections.abc import Set

import msgspec
from sqlalchemy import Connection, select

from shared.ledger.conditions import split_name
from shared.ledger.tables import idempotency

_CHUNK = 1000  # rows


class _Answer(msgspec.Struct):
    found: list[str] = []  # the messages that the request did not name


_decode_answer = msgspec.json.Decoder(_Answer).decode


def remembered_answer(connection: Connection, key: str) -> tuple[bytes, bytes] | None:
    """Return the digest of the first request with this idempotency key, and its answer."""
    query = select(idempotency.c.body, idempotency.c.response).where(idempotency.c.key == key)
    row = connection.execute(query).one_or_none()
    return None if row is None else (row.body, row.response)


def answers_before(connection: Connection, before: float, after: str, at_most: int) -> tuple[list[str], str | None]:
    """Read some idempotency keys, in their order; return those from before this time (Unix seconds), and the last one.

    after: the last one of the previous call; at first an empty text. The last one is None after the last call. No call
    reads the whole table: with many keys, that would take longer than a statement may.
    """
    query = select(idempotency.c.key, idempotency.c.created_at).where(idempotency.c.key > after)
    rows = connection.execute(query.order_by(idempotency.c.key).limit(at_most)).all()
    return [row.key for row in rows if row.created_at < before], rows[-1].key if len(rows) == at_most else None


def answers_about(connection: Connection, names: Set[str]) -> list[str]:
    """Return the idempotency keys whose answers name any of these messages."""
    query = select(idempotency.c.key, idempotency.c.response)
    answers = connection.execute(query, execution_options={"yield_per": _CHUNK})
    return [
        row.key
        for row in answers
        if not names.isdisjoint(split_name(name)[0] for name in _decode_answer(row.response).found)
    ]
