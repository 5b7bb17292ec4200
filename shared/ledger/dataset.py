"""The ledger as a dataset: one line for each recorded choice, in the chat format of Hugging Face datasets.

Everything is streamed: memory does not grow with the ledger. Without tokens, rows that have no text
(explorer.store_text: false, plain completions, erased rows) have no conversation to export; they are only counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Connection, select

from shared.experience import CorruptTokens, Sampling, Tokens, choice_name
from shared.ledger.conditions import in_parts
from shared.ledger.prefix import load_tokens
from shared.ledger.tables import experiences, lineage, payloads, signals, versions

CHUNK = 1000  # rows
EXPORTED = [column for column in experiences.c if column.info.get("exported")]
SAMPLING = [experiences.c[field.name] for field in fields(Sampling)]
_ARRAYS = [field.name for field in fields(Tokens)]
_MORE = [experiences.c[name] for name in ("id", "version_end", "taught", "exchange")]
_SIGNAL = [column.name for column in signals.c if column.name not in ("id", "msg_id", "choice")]
_NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def conversations(
    connection: Connection,
    where: Iterable[ColumnElement[bool]],
    with_tokens: bool = False,
    tokenizer: str | None = None,
) -> Iterator[dict[str, Any] | None]:
    """Yield each row as {messages, tools, and the exported columns}, oldest first; None for a row without text.

    with_tokens: add {prompt_ids, reply_ids, logprobs, sampling, version_end, signals, trained, tokenizer, exchange} and
    the texts that messages and tools do not hold {request, reply}; a row without messages then has null messages, and a
    row with damaged tokens has no ids, so that an import leaves it out.
    tokenizer: digest of the tokenizer.
    """
    more = *_MORE, versions.c.manifest_sha256
    query = select(*EXPORTED, *SAMPLING, *more, payloads.c.request, payloads.c.reply)
    query = query.outerjoin(versions, versions.c.version == experiences.c.consumed_version)
    query = query.outerjoin(payloads, payloads.c.experience_id == experiences.c.id).where(*where)
    result = connection.execute(query.order_by(experiences.c.id), execution_options={"yield_per": CHUNK})
    for rows in result.partitions():
        loaded = load_tokens(connection, [row.id for row in rows]) if with_tokens else {}
        logs = _signals(connection, rows) if with_tokens else {}
        trained = _lineage(connection, rows) if with_tokens else {}
        requests = _requests(connection, rows)
        for row in rows:
            request, reply = _texts(row, requests.get(row.msg_id))
            conversation, tokens = _conversation(row, request, reply), loaded.get(row.id)
            if isinstance(tokens, CorruptTokens):
                tokens = _NO_TOKENS
            if isinstance(tokens, Tokens):
                about = {**_tokens(row, tokens), "signals": logs.get((row.msg_id, row.choice), [])}
                about |= {"trained": _trained(row, trained.get(row.id, [])), "tokenizer": tokenizer}
                about |= _other_texts(request, reply, conversation)
                yield {**(conversation or {"messages": None, "tools": None, **_row_fields(row)}), **about}
            else:
                yield conversation


def _requests(connection: Connection, rows: Sequence[Any]) -> dict[str, bytes]:
    """Return requests that are stored with another choice of the same message, by message id."""
    lacking = sorted({row.msg_id for row in rows if row.request is None and row.reply is not None})
    found: dict[str, bytes] = {}
    query = select(experiences.c.msg_id, payloads.c.request).join(payloads).where(payloads.c.request.is_not(None))
    for mine in in_parts(experiences.c.msg_id, lacking):
        found.update((row.msg_id, row.request) for row in connection.execute(query.where(mine)))
    return found


def _signals(connection: Connection, rows: Sequence[Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the signals about each row, oldest first."""
    logs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    query = select(signals).where(signals.c.msg_id.in_({row.msg_id for row in rows})).order_by(signals.c.id)
    for row in connection.execute(query):
        signal = {name: row._mapping[name] for name in _SIGNAL if row._mapping[name] is not None}
        logs.setdefault((row.msg_id, row.choice), []).append(signal)
    return logs


def _tokens(row: Any, tokens: Tokens) -> dict[str, Any]:
    arrays = {name: getattr(tokens, name).tolist() for name in _ARRAYS}
    sampling = {column.name: row._mapping[column] for column in SAMPLING}
    exchange = None if row.exchange is None else row.exchange.hex()
    return {**arrays, "sampling": sampling, "version_end": row.version_end, "exchange": exchange}


def _lineage(connection: Connection, rows: Sequence[Any]) -> dict[int, list[dict[str, Any]]]:
    """Return the versions that were trained on each row, as shared.ledger.given.TrainedVersion, by the row's id."""
    found: dict[int, list[dict[str, Any]]] = {}
    query = select(lineage, versions.c.manifest_sha256).join(versions, versions.c.version == lineage.c.version)
    query = query.where(versions.c.manifest_sha256.is_not(None)).order_by(lineage.c.version)
    for part in in_parts(lineage.c.experience_id, [row.id for row in rows]):
        for row in connection.execute(query.where(part)):
            version = {"manifest_sha256": row.manifest_sha256, "consumed": row.consumed}
            found.setdefault(row.experience_id, []).append(version)
    return found


def _trained(row: Any, trained_versions: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the row was trained on, as shared.ledger.given.Trained."""
    if row.manifest_sha256 is None:
        return None
    return {"lessons": row.taught, "manifest_sha256": row.manifest_sha256, "versions": trained_versions}


def _texts(row: Any, of_message: bytes | None) -> tuple[Any, Any]:
    """Return the request and the reply; None for one that is not stored.

    of_message: the request, if it is stored with another choice.
    """
    stored = (row.request if row.request is not None else of_message, row.reply)
    request, reply = (None if text is None else msgspec.json.decode(text) for text in stored)
    return request, reply


def _other_texts(request: Any, reply: Any, conversation: dict[str, Any] | None) -> dict[str, Any]:
    """Return the texts that are not in the conversation, as the columns `request` and `reply`."""
    if conversation is None:
        return {"request": request, "reply": reply}
    return {"request": {name: request[name] for name in request if name not in ("messages", "tools")}, "reply": None}


def _conversation(row: Any, request: Any, reply: Any) -> dict[str, Any] | None:
    if request is None or not isinstance(request.get("messages"), list) or not isinstance(reply, dict):
        return None
    given = {name: value for name, value in reply.items() if value not in (None, [], "") or name == "content"}
    messages = [*request["messages"], {**given, "role": "assistant"}]
    return {"messages": messages, "tools": request.get("tools"), **_row_fields(row)}


def _row_fields(row: Any) -> dict[str, Any]:
    about = {column.name: row._mapping[column] for column in EXPORTED}
    return {**about, "conversation_id": row.conversation_id or choice_name(row.msg_id, row.choice)}
