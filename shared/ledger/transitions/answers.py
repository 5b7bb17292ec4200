"""Idempotency keys of feedback, each with the digest of its request and the answer."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, true, update

from shared.ledger.conditions import in_parts
from shared.ledger.connect import database_time, insert_into
from shared.ledger.tables import idempotency

NO_ANSWER = b"{}"  # while a request is applied in parts


def take_key(connection: Connection, key: str, body: bytes) -> None:
    """Store an idempotency key before its request is applied in parts, unless it is stored already."""
    values = {"key": key, "body": body, "response": NO_ANSWER, "created_at": database_time(connection)}
    connection.execute(insert_into(connection, idempotency).values(values).on_conflict_do_nothing())


def remember_answer(connection: Connection, key: str, body: bytes, response: bytes) -> None:
    """Store the answer for an idempotency key, in the transaction that it reports on. body: the request's digest.

    Raises IntegrityError if the key has an answer, or is another request's.
    """
    taken = (idempotency.c.key == key, idempotency.c.body == body, idempotency.c.response == NO_ANSWER)
    if not connection.execute(update(idempotency).where(*taken).values(response=response)).rowcount:
        row = {"key": key, "body": body, "response": response, "created_at": database_time(connection)}
        connection.execute(insert(idempotency).values(row))


def forget_answers(connection: Connection, keys: Sequence[str], before: float | None = None) -> None:
    """Delete these idempotency keys with their answers.

    before: only those from before this time, Unix seconds; another explorer may have deleted one that is used again.
    """
    old = true() if before is None else idempotency.c.created_at < before
    for mine in in_parts(idempotency.c.key, keys):
        connection.execute(delete(idempotency).where(mine, old))
