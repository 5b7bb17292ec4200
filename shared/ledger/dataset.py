"""The ledger as a dataset: one line for each recorded choice, in the chat format of Hugging Face datasets; out and in.

Everything streams: memory does not grow with the ledger. Without tokens, rows that have no text (explorer.store_text:
false, plain completions, erased rows) have no conversation to export and are counted apart.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from shared.errors import StartupError
from shared.experience import Tokens
from shared.ledger.prefix import load_tokens
from shared.ledger.tables import experiences, payloads, signals
from shared.ledger.transitions import choice_name
from shared.versions import fsync

_CHUNK = 1000  # rows
_ABOUT = (
    "msg_id",
    "choice",
    "conversation_id",
    "task_id",
    "run_id",
    "version",
    "state",
    "reward",
    "finish_reason",
    "consumed_version",
)
_ARRAYS = ("prompt_ids", "reply_ids", "logprobs")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_PACKED = ("tools", "signals")  # JSON in Parquet
_SAID = ("kind", "name", "value", "text", "key_name", "created_at")
_ENCODE = msgspec.json.encode


def conversations(
    connection: Connection, where: Iterable[ColumnElement[bool]], with_tokens: bool = False
) -> Iterator[dict[str, Any] | None]:
    """Each row as {messages, tools, and what is known about it}, oldest first; None for one without text.

    with_tokens: also {prompt_ids, reply_ids, logprobs, sampling, signals}; then a row without text has null messages.
    """
    columns = [experiences.c[name] for name in (*_ABOUT, "created_at", *_SAMPLING)]
    query = select(*columns, experiences.c.id, payloads.c.request, payloads.c.reply)
    query = query.outerjoin(payloads, payloads.c.experience_id == experiences.c.id).where(*where)
    result = connection.execute(query.order_by(experiences.c.id), execution_options={"yield_per": _CHUNK})
    for rows in result.partitions():
        loaded = load_tokens(connection, [row.id for row in rows]) if with_tokens else {}
        heard = _signals(connection, rows) if with_tokens else {}
        for row in rows:
            said, tokens = _conversation(row), loaded.get(row.id)
            if isinstance(tokens, Tokens):
                about = {**_tokens(row, tokens), "signals": heard.get((row.msg_id, row.choice), [])}
                yield {**(said or {"messages": None, "tools": None, **_about(row)}), **about}
            else:
                yield said


def _signals(connection: Connection, rows: Sequence[Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Everything said about each row, oldest first."""
    heard: dict[tuple[str, int], list[dict[str, Any]]] = {}
    query = select(signals).where(signals.c.msg_id.in_({row.msg_id for row in rows})).order_by(signals.c.id)
    for said in connection.execute(query):
        one = {name: getattr(said, name) for name in _SAID if getattr(said, name) is not None}
        heard.setdefault((said.msg_id, said.choice), []).append(one)
    return heard


def _tokens(row: Any, tokens: Tokens) -> dict[str, Any]:
    arrays = {name: getattr(tokens, name).tolist() for name in _ARRAYS}
    return {**arrays, "sampling": {name: getattr(row, name) for name in _SAMPLING}}


def _conversation(row: Any) -> dict[str, Any] | None:
    if row.request is None or row.reply is None:
        return None
    request, reply = msgspec.json.decode(row.request), msgspec.json.decode(row.reply)
    if not isinstance(request.get("messages"), list) or not isinstance(reply, dict):
        return None
    said = {name: value for name, value in reply.items() if value not in (None, [], "") or name == "content"}
    messages = [*request["messages"], {**said, "role": "assistant"}]
    return {"messages": messages, "tools": request.get("tools"), **_about(row)}


def _about(row: Any) -> dict[str, Any]:
    about = {name: getattr(row, name) for name in (*_ABOUT, "created_at")}
    return {**about, "conversation_id": row.conversation_id or choice_name(row.msg_id, row.choice)}


def write_jsonl(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """One JSON object on each line; packed when the name ends in .gz."""
    with gzip.open(file, "wb") if file.suffix == ".gz" else file.open("wb") as lines:
        for row in rows:
            lines.write(_ENCODE(row) + b"\n")


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `flywheel export` or someone else wrote. Raises StartupError, naming the line."""
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
            return
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                row = msgspec.json.decode(line) if line.strip() else None
                if isinstance(row, dict):
                    yield row
                elif line.strip():
                    raise StartupError(f"{file}, line {number}: not a JSON object")
    except msgspec.DecodeError as exc:
        raise StartupError(f"{file}: not JSON ({exc}); one object on each line") from exc
    except OSError as exc:
        raise StartupError(f"{file} cannot be read ({exc.strerror or exc})") from exc


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(_CHUNK):
            for row in batch.to_pylist():
                messages = row.get("messages")
                packed = {name: row[name] for name in _PACKED if isinstance(row.get(name), str)}
                yield {
                    **row,
                    "messages": messages if messages is None else [_unflat(message) for message in messages],
                    **{name: msgspec.json.decode(text) for name, text in packed.items()},
                }


def _unflat(message: dict[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if value is not None}
    if isinstance(said.get("tool_calls"), str):
        said["tool_calls"] = msgspec.json.decode(said["tool_calls"])
    return said


def write_parquet(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Parquet, a row group for each thousand rows. Raises StartupError without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise StartupError(
            "Parquet needs pyarrow, which is not installed; pip install pyarrow, or name a .jsonl file"
        ) from exc

    text = pa.string()
    message = pa.struct([(name, text) for name in ("role", "content", "tool_calls", "tool_call_id", "name")])
    kinds = {
        "choice": pa.int32(),
        "version": pa.int32(),
        "consumed_version": pa.int32(),
        "reward": pa.float64(),
        "created_at": pa.float64(),
    }
    schema = pa.schema(
        [("messages", pa.list_(message)), *((name, text) for name in _PACKED)]
        + [(n, kinds.get(n, text)) for n in (*_ABOUT, "created_at")]
        + [("prompt_ids", pa.list_(pa.int32())), ("reply_ids", pa.list_(pa.int32()))]
        + [("logprobs", pa.list_(pa.float32())), ("sampling", pa.struct([(n, pa.float64()) for n in _SAMPLING]))]
    )
    with pq.ParquetWriter(file, schema) as writer:
        part: list[dict[str, Any]] = []
        for row in rows:
            messages = None if row["messages"] is None else [_flat(m) for m in row["messages"]]
            part.append({**row, "messages": messages, **{name: _as_text(row.get(name)) for name in _PACKED}})
            if len(part) == _CHUNK:
                writer.write_table(pa.Table.from_pylist(part, schema))
                part.clear()
        writer.write_table(pa.Table.from_pylist(part, schema))


def _flat(message: Any) -> dict[str, str | None]:
    """A message with texts only: what is structured becomes JSON."""
    if not isinstance(message, dict):
        return {"content": _as_text(message)}
    return {name: _as_text(message.get(name)) for name in ("role", "content", "tool_calls", "tool_call_id", "name")}


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _ENCODE(value).decode()


def replace_whole(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the file beside its place and move it there: never half of one, and durable. Raises StartupError."""
    writers = {".jsonl": write_jsonl, ".gz": write_jsonl, ".parquet": write_parquet}
    if file.suffix not in writers or (file.suffix == ".gz" and not file.stem.endswith(".jsonl")):
        raise StartupError(f"{str(file)!r}: the name must end in .jsonl, .jsonl.gz or .parquet")
    temporary = file.with_name(f".part-{file.name}")
    try:
        writers[file.suffix](rows, temporary)
        fsync(temporary)
        temporary.replace(file)
        fsync(file.parent)
    except OSError as exc:
        raise StartupError(f"{file} cannot be written ({exc.strerror}); name another with --out") from exc
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
