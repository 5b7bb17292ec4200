"""Files of rows, as JSON lines or Parquet: written by `flywheel export` and `archive`, and read from any software."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import StartupError
from shared.ledger.dataset import CHUNK, EXPORTED, SAMPLING
from shared.process import is_gone, process_name
from shared.versions import fsync

_PACKED = ("tools", "signals", "trained", "request", "reply")  # stored as JSON in Parquet
_MESSAGE = ("role", "content", "tool_calls", "tool_call_id", "name")  # columns of a message in Parquet
_MORE = "more"  # its last column: JSON of what the others cannot hold
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NO_NUMBER = re.compile(rb"[\[:,]\s*-?(NaN|Infinity)\b")  # of json.dumps and pandas
_ONE_LINE = "write one object on each line"
_ENCODE = msgspec.json.encode


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
    message = pa.struct([(name, text) for name in (*_MESSAGE, _MORE)])
    types = {int: pa.int32(), float: pa.float64(), str: text}
    sampling = [(column.name, pa.bool_() if column.type.python_type is bool else pa.float64()) for column in SAMPLING]
    schema = pa.schema(
        [("messages", pa.list_(message)), *((name, text) for name in _PACKED)]
        + [(column.name, types[column.type.python_type]) for column in EXPORTED]
        + [("prompt_ids", pa.list_(pa.int32())), ("reply_ids", pa.list_(pa.int32()))]
        + [("logprobs", pa.list_(pa.float32()))]
        + [("sampling", pa.struct(sampling)), ("version_end", pa.int32())]
        + [("tokenizer", text), ("exchange", text)]
    )
    with pq.ParquetWriter(file, schema) as writer:
        part: list[dict[str, Any]] = []
        for row in rows:
            messages = None if row["messages"] is None else [_flat(m) for m in row["messages"]]
            part.append({**row, "messages": messages, **{name: _as_text(row.get(name)) for name in _PACKED}})
            if len(part) == CHUNK:
                writer.write_table(pa.Table.from_pylist(part, schema))
                part.clear()
        writer.write_table(pa.Table.from_pylist(part, schema))


def _flat(message: Any) -> dict[str, str | None]:
    """Convert a message to texts; _MORE names those that are JSON of structured values, and has all other fields."""
    if not isinstance(message, dict):
        return {"content": _as_text(message)}
    packed = [name for name in _MESSAGE if not isinstance(message.get(name), str | None)]
    other = {name: value for name, value in message.items() if name not in _MESSAGE and value is not None}
    more = {"packed": packed, "other": other} if packed or other else None
    return {**{name: _as_text(message.get(name)) for name in _MESSAGE}, _MORE: _as_text(more)}


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _ENCODE(value).decode()


def replace_whole(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a temporary file and rename it: the file is complete and durable, or absent. Raises StartupError."""
    writers = {".jsonl": write_jsonl, ".gz": write_jsonl, ".parquet": write_parquet}
    if file.suffix not in writers or (file.suffix == ".gz" and not file.stem.endswith(".jsonl")):
        raise StartupError(f"{str(file)!r}: the name must end in .jsonl, .jsonl.gz or .parquet")
    temporary = file.with_name(f".part-{process_name()}-{file.name}")  # another export of this name may be running
    try:
        remove_left_behind(file.parent)
        writers[file.suffix](rows, temporary)
        fsync(temporary)
        temporary.replace(file)
        fsync(file.parent)
    except OSError as exc:
        raise StartupError(f"{file} cannot be written ({exc.strerror or exc}); choose another folder") from exc
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_left_behind(folder: Path) -> list[str]:
    """Delete temporary files of killed exports. Returns the names of the files that they were to become."""
    found = []
    fields = process_name().count("-") + 1
    for left in folder.glob(".part-*"):
        *owner, name = left.name.removeprefix(".part-").split("-", fields)
        if len(owner) == fields and is_gone("-".join(owner)):
            left.unlink(missing_ok=True)
            found.append(name)
    return found


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises StartupError with the line."""
    try:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)
    except (EOFError, zlib.error) as exc:
        raise StartupError(f"{file} cannot be read: it is cut off or damaged ({exc}); copy it again") from exc
    except OSError as exc:
        raise StartupError(f"{file} cannot be read ({exc.strerror or exc})") from exc


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            text = line.removeprefix(_BYTE_ORDER_MARK).strip()
            try:
                row = msgspec.json.decode(text) if text else None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                fix = "NaN and Infinity are not JSON, write null" if _NO_NUMBER.search(text) else _ONE_LINE
                reason = f"not JSON in UTF-8 ({exc}); {fix}"
                raise StartupError(f"{file}, line {number}: {reason}") from exc
            if isinstance(row, dict):
                yield row
            elif text:
                raise StartupError(f"{file}, line {number}: not a JSON object")


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise StartupError(
            "Parquet needs pyarrow, which is not installed; pip install pyarrow, or write a .jsonl file"
        ) from exc
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(CHUNK):
                for row in batch.to_pylist():
                    yield _unpacked(row)
    except (pa.ArrowException, msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise StartupError(f"{file} cannot be read as Parquet ({exc}); write it again, or as .jsonl") from exc


def _unpacked(row: dict[str, Any]) -> dict[str, Any]:
    messages = row.get("messages")
    if isinstance(messages, list):
        row["messages"] = [_unflat(message) if isinstance(message, dict) else message for message in messages]
    return {**row, **{name: _decoded(row[name]) for name in _PACKED if name in row}}


def _unflat(message: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    if _MORE in message:  # written by Flywheel, which says what is JSON
        more = _decode_more(given.pop(_MORE, "{}"))
        return {**given, **{name: _decoded(given[name]) for name in more.packed if name in given}, **more.other}
    unpack = {"tool_calls": _decoded, "content": _parts}
    return {name: unpack[name](value) if name in unpack else value for name, value in given.items()}


class _More(msgspec.Struct):
    """What the other columns of a message do not hold."""

    packed: list[str] = []  # those whose text is JSON
    other: dict[str, Any] = {}


_decode_more = msgspec.json.Decoder(_More).decode


def _parts(content: Any) -> Any:
    """Return a message's parts if its content is JSON of parts; any other content unchanged."""
    found = _decoded(content) if isinstance(content, str) and content.startswith("[{") else None
    is_parts = isinstance(found, list) and all(isinstance(part, dict) and "type" in part for part in found)
    return found if is_parts else content


def _decoded(value: Any) -> Any:
    """Decode a JSON string; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
