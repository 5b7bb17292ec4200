"""Idempotency keys: a repeated request gets its first answer, and is not applied again.

Of an answer, only the states are stored, and the names that the request does not contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import msgspec
from sqlalchemy import Connection

from explorer_service.api.errors import ApiError
from shared.ledger import queries, transitions
from shared.ledger.transitions import NO_ANSWER, Receipt, ReceiptState

_STATES: tuple[ReceiptState, ...] = get_args(ReceiptState)


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with an idempotency key."""

    key: str  # digest of caller and key
    body: bytes  # SHA-256 of the body


class _Remembered(msgspec.Struct):
    states: str  # a digit for each receipt: its index in ReceiptState
    found: list[str]  # names that are not in the request


_decode_remembered = msgspec.json.Decoder(_Remembered).decode


def recall(connection: Connection, keyed: KeyedRequest | None, msg_ids: list[str]) -> list[Receipt] | None:
    """Return the first answer to the request; None if there is none. Raises ApiError 422 if its body was another."""
    stored = None if keyed is None else queries.remembered_answer(connection, keyed.key)
    if keyed is None or stored is None:
        return None
    body, response = stored
    if bytes(body) != keyed.body:
        reason = "this Idempotency-Key was used with another body; use a new key for a new request"
        raise ApiError(422, reason, code="idempotency_key_reused")
    if bytes(response) == NO_ANSWER:
        return None
    remembered = _decode_remembered(response)
    names = [*msg_ids, *remembered.found]
    return [Receipt(name, _STATES[int(state)]) for name, state in zip(names, remembered.states, strict=True)]


def take(connection: Connection, keyed: KeyedRequest, msg_ids: list[str]) -> list[Receipt] | None:
    """Refuse other bodies from now on: this request is applied in several transactions. Returns as `recall` does."""
    transitions.take_key(connection, keyed.key, keyed.body)
    return recall(connection, keyed, msg_ids)


def remember(connection: Connection, keyed: KeyedRequest | None, msg_ids: list[str], receipts: list[Receipt]) -> None:
    """Store an answer, in the transaction of its last change. receipts: those of `msg_ids` come first, in order."""
    if keyed is None:
        return
    states = "".join(str(_STATES.index(receipt.state)) for receipt in receipts)
    found = [receipt.msg_id for receipt in receipts[len(msg_ids) :]]
    transitions.remember_answer(connection, keyed.key, keyed.body, msgspec.json.encode(_Remembered(states, found)))
