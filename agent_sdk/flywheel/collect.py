"""Collector: records a production agent's chats with any provider, as rows for `flywheel import`.

It is a transport in the agent's httpx client. In the caller's path it only copies bytes; a thread parses and writes.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from flywheel.collection import Row, end_cut_line, merge
from flywheel.connections import for_transport
from flywheel.errors import ConfigError, describe
from flywheel.forks import renew_after_fork
from flywheel.proxies import AsyncProxiedTransport, ProxiedTransport
from flywheel.replies import read_reply, thoughts_of, tool_calls_of
from flywheel.transport import current_run
from flywheel.wire import check_number, to_number

FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")
_MOST_BYTES = 16 * 2**20  # maximum size of one reply
_AS_OPENAI: dict[str, Any] = {"timeout": httpx.Timeout(600.0, connect=5.0), "follow_redirects": True}


@dataclass
class CollectorStats:
    """Counters of a Collector.

    >>> CollectorStats().rows
    0
    """

    rows: int = 0
    dropped: int = 0  # the queue or the file was full, a reply was too long, or the collector was closed
    failed: int = 0  # replies that are no chats, and redactions that raised an error
    last_error: str | None = None


@dataclass
class _Seen:
    """An exchange as it was transferred."""

    body: bytes
    headers: httpx.Headers
    pieces: list[bytes]
    task_id: str | None
    run_id: str | None
    at: float
    is_cut: bool = False  # the reply is too long


class Collector:
    """Records chats to a file of JSON lines: messages with the reply, thoughts, tool calls with their results.

    fields: names from FIELDS to write; messages are always written. redact: a function that returns the row to write,
    or None for none; it runs in the collector's thread. Rows beyond max_mb are dropped. export() adds rewards and
    feedback to the rows.

    >>> import tempfile, openai
    >>> with Collector(Path(tempfile.mkdtemp()) / "chats.jsonl") as collector:
    ...     client = openai.OpenAI(api_key="k", http_client=collector.http_client())
    ...     collector.stats.rows
    0
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: tuple[str, ...] = FIELDS,
        redact: Callable[[Row], Row | None] | None = None,
        queue_size: int = 1000,
        max_mb: float = 256.0,
    ) -> None:
        if unknown := sorted(set(fields) - set(FIELDS)):
            raise ConfigError(f"fields={unknown}: give some of {list(FIELDS)}")
        self.path = Path(path)
        self.stats = CollectorStats()
        self._fields = {*fields, "messages"}
        self._redact = redact
        self._most_bytes = int(max_mb * 2**20)
        self._queue_size = queue_size
        self._file = self.path.open("a+b", buffering=0)  # a fork copies neither a part of a line nor a held lock
        end_cut_line(self._file)
        self._is_closed = False
        self._begin()
        renew_after_fork(self)

    def _begin(self) -> None:
        self._waiting: queue.Queue[_Seen | Row | None] = queue.Queue(self._queue_size)
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="flywheel-collector", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """In a forked process: count from 0, and write to the same file, which is only appended to."""
        self.stats = CollectorStats()
        if not self._is_closed:
            self._begin()

    def http_client(self, **options: Any) -> httpx.Client:
        """Return an httpx client for the agent's client: openai.OpenAI(http_client=…). options: of httpx.Client.

        The defaults are those of openai's own client. The environment's proxy is used.
        """
        inner = ProxiedTransport(for_transport(options), trust_env=options.get("trust_env", True))
        return httpx.Client(transport=_Collecting(inner, self._offer), **{**_AS_OPENAI, **options})

    def async_http_client(self, **options: Any) -> httpx.AsyncClient:
        """Return an httpx client for asyncio."""
        inner = AsyncProxiedTransport(for_transport(options), trust_env=options.get("trust_env", True))
        return httpx.AsyncClient(transport=_AsyncCollecting(inner, self._offer), **{**_AS_OPENAI, **options})

    def reward(self, msg_id: str, **parts: float) -> None:
        """Record named rewards of a reply, such as task_completion=0.8; their sum is the row's reward."""
        rewards = {name: to_number(value) for name, value in parts.items() if value is not None}
        for name, value in rewards.items():
            check_number(name, value)
        self._offer({"of": msg_id, "rewards": rewards})

    def feedback(self, msg_id: str, *, rating: float | str | None = None, comment: str | None = None) -> None:
        """Record a user's feedback on a reply."""
        rating = to_number(rating)
        if not isinstance(rating, str):
            check_number("rating", rating)
        said = {"rating": rating, "comment": comment}
        self._offer({"of": msg_id, "user_feedback": {name: value for name, value in said.items() if value is not None}})

    def export(self, path: str | Path) -> int:
        """Write the rows with rewards and feedback to another file for `flywheel import`. Returns their number."""
        self._waiting.join()
        return merge(self.path, Path(path))

    def close(self) -> None:
        """Write queued rows, and stop; later ones are dropped. A second call does nothing."""
        with self._closing:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed and self._thread.is_alive():  # else nobody empties a full queue
            self._waiting.put(None)
        self._thread.join()
        self._file.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _offer(self, seen: _Seen | Row) -> None:
        with self._closing:  # after the writer's end, nothing is queued: export would wait for it
            if self._is_closed or self._waiting.full():
                self.stats.dropped += 1
            else:
                self._waiting.put_nowait(seen)

    def _write(self) -> None:
        while (seen := self._waiting.get()) is not None:
            try:
                for row in [seen] if isinstance(seen, dict) else self._rows(seen):
                    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                    if self._file.tell() + len(line) > self._most_bytes:
                        self.stats.dropped += 1
                        continue
                    while line := line[self._file.write(line) :]:
                        pass
                    self.stats.rows += "messages" in row
            except Exception as exc:  # noqa: BLE001 — a user's redaction, a full disk: production continues
                self.stats.failed += 1
                self.stats.last_error = describe(exc)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _rows(self, seen: _Seen) -> Iterator[Row]:
        """Yield a row for each choice."""
        if seen.is_cut:
            self.stats.dropped += 1
            return
        body = json.loads(seen.body)
        content = httpx.Response(200, headers=seen.headers, content=b"".join(seen.pieces)).content
        msg_id, model, replies = read_reply(content)
        for index, reply in enumerate(replies):
            messages = [*body["messages"], reply]
            row: Row = {"messages": messages, "msg_id": msg_id, "choice": index, "model": model or body.get("model")}
            row |= {
                "created_at": seen.at,
                "task_id": seen.task_id,
                "run_id": seen.run_id,
                "conversation_id": seen.run_id,
            }
            row |= {"tools": body["tools"]} if body.get("tools") else {}
            row |= {"thoughts": thoughts_of(messages)} if "thoughts" in self._fields else {}
            row |= {"tool_calls": tool_calls_of(messages)} if "tool_calls" in self._fields else {}
            found = row if self._redact is None else self._redact(row)
            if found is not None:
                yield {name: value for name, value in found.items() if value is not None}


class _Keep:
    """Collects the pieces of one reply, and submits them at its end."""

    def __init__(self, request: httpx.Request, response: httpx.Response, offer: Callable[[_Seen | Row], None]) -> None:
        run = current_run.get()
        task_id, run_id = (None, None) if run is None else (run.task_id, run.run_id)
        self._seen = _Seen(request.content, response.headers, [], task_id, run_id, time.time())
        self._offer = offer
        self._bytes = 0
        self._ended = False

    def see(self, piece: bytes) -> None:
        self._bytes += len(piece)
        if self._bytes <= _MOST_BYTES:
            self._seen.pieces.append(piece)
        else:
            self._seen.is_cut = True

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._offer(self._seen)


class _KeptStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, keep: _Keep) -> None:
        self._stream, self._keep = stream, keep

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._keep.see(piece)
            yield piece

    def close(self) -> None:  # a caller may stop reading at a stream's [DONE]
        self._keep.end()
        self._stream.close()


class _KeptAsyncStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, keep: _Keep) -> None:
        self._stream, self._keep = stream, keep

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._keep.see(piece)
            yield piece

    async def aclose(self) -> None:
        self._keep.end()
        await self._stream.aclose()


def _keep(request: httpx.Request, response: httpx.Response, offer: Callable[[_Seen | Row], None]) -> _Keep | None:
    """Return a recorder for a chat's reply; None for other requests, and for request bodies sent as a stream."""
    if request.method != "POST" or response.status_code != 200 or not request.url.path.endswith("/chat/completions"):
        return None
    try:
        return _Keep(request, response, offer)
    except httpx.RequestNotRead:
        return None


class _Collecting(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, offer: Callable[[_Seen | Row], None]) -> None:
        self._inner, self._offer = inner, offer

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        keep = _keep(request, response, self._offer)
        if keep is not None and isinstance(response.stream, httpx.SyncByteStream):
            response.stream = _KeptStream(response.stream, keep)
        return response

    def close(self) -> None:
        self._inner.close()


class _AsyncCollecting(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport, offer: Callable[[_Seen | Row], None]) -> None:
        self._inner, self._offer = inner, offer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        keep = _keep(request, response, self._offer)
        if keep is not None and isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _KeptAsyncStream(response.stream, keep)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()
