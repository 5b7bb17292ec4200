"""The ledger as a dataset: one line for each recorded choice, in the chat format of Hugging Face datasets.

Everything streams: memory does not grow with the ledger. Rows without text (explorer.store_text: false, plain
completions, erased rows) have no conversation to export and are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from shared.errors import StartupError
from shared.ledger.tables import experiences, payloads

_CHUNK = 1000  # rows
_ABOUT = ("msg_id", "choice", "conversation_id", "task_id", "run_id", "version", "state", "reward", "finish_reason")
_ENCODE = msgspec.json.encode


def conversations(connection: Connection, where: Iterable[ColumnElement[bool]]) -> Iterator[dict[str, Any] | None]:
    """Each row as {messages, tools, and what is known about it}, oldest first; None for one without text."""
    columns = [experiences.c[name] for name in (*_ABOUT, "created_at")]
    query = select(*columns, payloads.c.request, payloads.c.reply)
    query = query.outerjoin(payloads, payloads.c.experience_id == experiences.c.id).where(*where)
    result = connection.execute(query.order_by(experiences.c.id), execution_options={"yield_per": _CHUNK})
    for row in result:
        yield _conversation(row)


def _conversation(row: Any) -> dict[str, Any] | None:
    if row.request is None or row.reply is None:
        return None
    request, reply = msgspec.json.decode(row.request), msgspec.json.decode(row.reply)
    if not isinstance(request.get("messages"), list) or not isinstance(reply, dict):
        return None
    said = {name: value for name, value in reply.items() if value not in (None, [], "") or name == "content"}
    about = {name: getattr(row, name) for name in (*_ABOUT, "created_at")}
    return {"messages": [*request["messages"], {**said, "role": "assistant"}], "tools": request.get("tools"), **about}


def write_jsonl(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """One JSON object on each line."""
    with file.open("wb") as stream:
        for row in rows:
            stream.write(_ENCODE(row) + b"\n")


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
    kinds = {"choice": pa.int32(), "version": pa.int32(), "reward": pa.float64(), "created_at": pa.float64()}
    schema = pa.schema(
        [("messages", pa.list_(message)), ("tools", text)] + [(n, kinds.get(n, text)) for n in (*_ABOUT, "created_at")]
    )
    with pq.ParquetWriter(file, schema) as writer:
        part: list[dict[str, Any]] = []
        for row in rows:
            part.append({**row, "messages": [_flat(m) for m in row["messages"]], "tools": _as_text(row["tools"])})
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
    """Write the file beside its place and move it there, so that there is never half of one. Raises StartupError."""
    writers = {".jsonl": write_jsonl, ".parquet": write_parquet}
    if file.suffix not in writers:
        raise StartupError(f"--out {str(file)!r}: the name must end in .jsonl or .parquet")
    temporary = file.with_name(f".{file.name}.part")
    try:
        writers[file.suffix](rows, temporary)
        temporary.replace(file)
    except OSError as exc:
        raise StartupError(f"{file} cannot be written ({exc.strerror}); name another with --out") from exc
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
