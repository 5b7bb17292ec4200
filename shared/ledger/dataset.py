"""The ledger as a dataset: one line for each recorded choice, in the chat format of Hugging Face datasets.

Everything is streamed: memory does not grow with the ledger. Without tokens, rows that have no text
(explorer.store_text: false, plain completions, erased rows) have no conversation to export; they are only counted.
"""

from __future__ import annotations

import glob
import gzip
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import ColumnElement, Connection, select

from shared.errors import StartupError
from shared.experience import CorruptTokens, Sampling, Tokens, choice_name
from shared.ledger.conditions import in_parts
from shared.ledger.prefix import load_tokens
from shared.ledger.tables import experiences, lineage, payloads, signals, versions
from shared.process import is_gone, process_name
from shared.versions import fsync

CHUNK = 1000  # rows
_EXPORTED = [column for column in experiences.c if column.info.get("exported")]
_SAMPLING = [experiences.c[field.name] for field in fields(Sampling)]
_ARRAYS = [field.name for field in fields(Tokens)]
_SIGNAL = [column.name for column in signals.c if column.name not in ("id", "msg_id", "choice")]
PACKED = ("tools", "signals", "trained")  # stored as JSON in Parquet
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name")
_ENCODE = msgspec.json.encode
_NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def conversations(
    connection: Connection,
    where: Iterable[ColumnElement[bool]],
    with_tokens: bool = False,
    tokenizer: str | None = None,
) -> Iterator[dict[str, Any] | None]:
    """Yield each row as {messages, tools, and the exported columns}, oldest first; None for a row without text.

    with_tokens: add {prompt_ids, reply_ids, logprobs, sampling, version_end, signals, trained, tokenizer}; a row
    without text then has null messages, and a row with damaged tokens has no ids, so that an import leaves it out.
    tokenizer: digest of the tokenizer.
    """
    more = (experiences.c.id, experiences.c.version_end, experiences.c.taught, versions.c.manifest_sha256)
    query = select(*_EXPORTED, *_SAMPLING, *more, payloads.c.request, payloads.c.reply)
    query = query.outerjoin(versions, versions.c.version == experiences.c.consumed_version)
    query = query.outerjoin(payloads, payloads.c.experience_id == experiences.c.id).where(*where)
    result = connection.execute(query.order_by(experiences.c.id), execution_options={"yield_per": CHUNK})
    for rows in result.partitions():
        loaded = load_tokens(connection, [row.id for row in rows]) if with_tokens else {}
        logs = _signals(connection, rows) if with_tokens else {}
        trained = _lineage(connection, rows) if with_tokens else {}
        requests = _requests(connection, rows)
        for row in rows:
            conversation, tokens = _conversation(row, requests.get(row.msg_id)), loaded.get(row.id)
            if isinstance(tokens, CorruptTokens):
                tokens = _NO_TOKENS
            if isinstance(tokens, Tokens):
                about = {**_tokens(row, tokens), "signals": logs.get((row.msg_id, row.choice), [])}
                about |= {"trained": _trained(row, trained.get(row.id, [])), "tokenizer": tokenizer}
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
    sampling = {column.name: row._mapping[column] for column in _SAMPLING}
    return {**arrays, "sampling": sampling, "version_end": row.version_end}


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


def _conversation(row: Any, of_message: bytes | None) -> dict[str, Any] | None:
    """of_message: the request, if it is stored with another choice."""
    stored = row.request if row.request is not None else of_message
    if stored is None or row.reply is None:
        return None
    request, reply = msgspec.json.decode(stored), msgspec.json.decode(row.reply)
    if not isinstance(request.get("messages"), list) or not isinstance(reply, dict):
        return None
    given = {name: value for name, value in reply.items() if value not in (None, [], "") or name == "content"}
    messages = [*request["messages"], {**given, "role": "assistant"}]
    return {"messages": messages, "tools": request.get("tools"), **_row_fields(row)}


def _row_fields(row: Any) -> dict[str, Any]:
    about = {column.name: row._mapping[column] for column in _EXPORTED}
    return {**about, "conversation_id": row.conversation_id or choice_name(row.msg_id, row.choice)}


def write_jsonl(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Write one JSON object on each line; compressed if the name ends in .gz."""
    with gzip.open(file, "wb") if file.suffix == ".gz" else file.open("wb") as lines:
        for row in rows:
            lines.write(_ENCODE(row) + b"\n")


def write_parquet(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Write Parquet with a row group for each chunk. Raises StartupError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise StartupError(
            "Parquet needs pyarrow, which is not installed; pip install pyarrow, or name a .jsonl file"
        ) from exc

    text = pa.string()
    message = pa.struct([(name, text) for name in _MESSAGE])
    types = {int: pa.int32(), float: pa.float64(), str: text}
    sampling = [(column.name, pa.bool_() if column.type.python_type is bool else pa.float64()) for column in _SAMPLING]
    schema = pa.schema(
        [("messages", pa.list_(message)), *((name, text) for name in PACKED)]
        + [(column.name, types[column.type.python_type]) for column in _EXPORTED]
        + [("prompt_ids", pa.list_(pa.int32())), ("reply_ids", pa.list_(pa.int32()))]
        + [("logprobs", pa.list_(pa.float32()))]
        + [("sampling", pa.struct(sampling)), ("version_end", pa.int32()), ("tokenizer", text)]
    )
    with pq.ParquetWriter(file, schema) as writer:
        part: list[dict[str, Any]] = []
        for row in rows:
            messages = None if row["messages"] is None else [_flat(m) for m in row["messages"]]
            part.append({**row, "messages": messages, **{name: _as_text(row.get(name)) for name in PACKED}})
            if len(part) == CHUNK:
                writer.write_table(pa.Table.from_pylist(part, schema))
                part.clear()
        writer.write_table(pa.Table.from_pylist(part, schema))


def _flat(message: Any) -> dict[str, str | None]:
    """Convert a message's values to strings: structured ones become JSON."""
    if not isinstance(message, dict):
        return {"content": _as_text(message)}
    return {name: _as_text(message.get(name)) for name in _MESSAGE}


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _ENCODE(value).decode()


def replace_whole(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a temporary file and rename it: the file is complete and durable, or absent. Raises StartupError."""
    writers = {".jsonl": write_jsonl, ".gz": write_jsonl, ".parquet": write_parquet}
    if file.suffix not in writers or (file.suffix == ".gz" and not file.stem.endswith(".jsonl")):
        raise StartupError(f"{str(file)!r}: the name must end in .jsonl, .jsonl.gz or .parquet")
    temporary = file.with_name(f".part-{process_name()}-{file.name}")  # another export of this name may be running
    try:
        _remove_left_behind(file)
        writers[file.suffix](rows, temporary)
        fsync(temporary)
        temporary.replace(file)
        fsync(file.parent)
    except OSError as exc:
        raise StartupError(f"{file} cannot be written ({exc.strerror or exc}); choose another folder") from exc
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_left_behind(file: Path) -> None:
    """Delete temporary files of killed exports of this name."""
    for left in file.parent.glob(f".part-*-{glob.escape(file.name)}"):
        owner = left.name.removeprefix(".part-").removesuffix(f"-{file.name}")
        if owner.count("-") == process_name().count("-") and is_gone(owner):
            left.unlink(missing_ok=True)
