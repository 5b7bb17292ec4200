"""httpx transports that add the run to chats, apply the model's fields, and register replies.

This module alone decides what belongs to a run, for any framework: it sends headers, reads message ids from responses,
and a guard may refuse. A request to any host but the run's explorer is not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx

from flywheel.addresses import is_for, naming
from flywheel.connections import AsyncHttpClient, Connections, HttpClient, for_transport
from flywheel.wire import UNSERVED

if TYPE_CHECKING:
    from flywheel.model import Model

TASK_HEADER = "X-Flywheel-Task"
RUN_HEADER = "X-Flywheel-Run"
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]+)"')
_UNFIT = re.compile(r"^[ \t]|[ \t]\Z|[\x00-\x08\x0a-\x1f\x7f]")  # what a header's value cannot contain
_BROKEN_OFF = re.compile(rb'data: \{"error":.*"service_unavailable"')  # the end of a stream whose engine was lost
_NO_ANSWER = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
_HEAD_BYTES = 8192  # of a response: its id is at the start, also in a stream's first event


class Guard(Protocol):
    """Checks the chats of a shadow run; may raise UnsafeTool."""

    def check_request(self, body: Mapping[str, Any]) -> None:
        """Called before the request is sent."""

    def watch_reply(self) -> Callable[[bytes], None]:
        """Return a function for each piece of one reply, to call before the piece reaches the agent."""


class Attributed(Protocol):
    """The attributes of a run that the transport uses."""

    is_away: bool  # the transport sets it at each chat: whether no engine, or no explorer, answered

    @property
    def task_id(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def origin(self) -> str:
        """The explorer: scheme://host:port."""

    @property
    def trainee(self) -> str:
        """The trainee's name there."""

    @property
    def guard(self) -> Guard | None: ...
    @property
    def is_recorded(self) -> bool:
        """Whether its chats are recorded; only a run with a guard may be without."""

    def note_reply(self, msg_id: str | None, recorded: bool) -> None:
        """Called at the start of a reply."""


current_run: ContextVar[Attributed | None] = ContextVar("flywheel_run", default=None)


class Pin(NamedTuple):
    """What learn and an evaluation add to chats of models that outlive a run, such as those of http_client."""

    origin: str  # of the explorer
    trainee: str  # its name there
    overrides: Mapping[str, Any]
    defaults: Mapping[str, Any]
    evaluated: Model | None = None  # the model of an evaluation, for runs that begin in it

    def applied(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a chat with the trainee as that of the evaluation; any other one unchanged."""
        if body.get("model") != self.trainee or body.get("store") is False:
            return body
        return {**self.defaults, **body, **self.overrides}


current_pin: ContextVar[Pin | None] = ContextVar("flywheel_pin", default=None)


class Chats:
    """How a transport changes a model's chats: the run that they belong to, and fields of their bodies."""

    def __init__(self, run: Attributed | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """run: None: the context's run at each request. overrides, defaults: fields of bodies."""
        self._run = run
        self._overrides = dict(overrides)
        self._defaults = dict(defaults)

    def prepare(self, request: httpx.Request) -> tuple[httpx.Request, Attributed | None]:
        """Return the request to send, and the run that it belongs to. Raises UnsafeTool."""
        run = self._run or current_run.get()
        if run is not None and not is_for(request.url, run.origin):
            run = None
        pin = current_pin.get() if self._run is None else None
        if pin is not None and not is_for(request.url, pin.origin):
            pin = None
        if request.method == "POST" and (self._overrides or self._defaults or pin or (run and run.guard)):
            request = self._rewritten(request, run, pin)
        if run is not None:
            headers = request.headers
            if TASK_HEADER not in headers and not (_fits_header(run.task_id) and _fits_header(run.run_id)):
                request.url = naming(request.url, run.task_id, run.run_id)
            elif TASK_HEADER not in headers:
                headers.encoding = "utf-8"  # the explorer decodes them as UTF-8
                headers[TASK_HEADER] = run.task_id
                headers[RUN_HEADER] = run.run_id
            headers["Accept-Encoding"] = "identity"  # the id is read from the passing bytes
        return request, run

    def _rewritten(self, request: httpx.Request, run: Attributed | None, pin: Pin | None) -> httpx.Request:
        try:
            body = json.loads(request.read())
        except ValueError:
            return request
        if not isinstance(body, dict):
            return request
        if run is not None and run.guard is not None:
            run.guard.check_request(body)
        changed = {**self._defaults, **body, **self._overrides}
        changed = changed if pin is None else pin.applied(changed)
        if run is not None and not run.is_recorded:
            changed["store"] = False
        if changed == body:
            return request
        headers = [(n, v) for n, v in request.headers.raw if n.lower() not in (b"content-length", b"transfer-encoding")]
        return httpx.Request(
            request.method,
            request.url,
            headers=headers,
            content=json.dumps(changed).encode(),
            extensions=request.extensions,
        )


def _fits_header(text: str) -> bool:
    return _UNFIT.search(text) is None


class _Watch:
    """Reads the id in a response's first bytes, and passes each piece to the guard."""

    def __init__(self, run: Attributed, response: httpx.Response) -> None:
        self.run = run
        self._recorded = response.headers.get("x-flywheel-recorded") != "false"
        self._head: bytes | None = b""
        self._check = None if run.guard is None else run.guard.watch_reply()

    def see(self, piece: bytes) -> None:
        if _BROKEN_OFF.search(piece):
            self.run.is_away = True
        if self._check is not None:
            self._check(piece)
        if self._head is not None:
            self._head += piece
            found = _ID.search(self._head)
            if found or len(self._head) > _HEAD_BYTES:
                self.end(found[1].decode() if found else None)

    def end(self, msg_id: str | None = None) -> None:
        if self._head is not None:
            self._head = None
            self.run.note_reply(msg_id, self._recorded)


@contextmanager
def _noting(run: Attributed | None) -> Iterator[None]:
    try:
        yield
    except _NO_ANSWER:
        if run is not None:
            run.is_away = True
        raise


def _is_answered(run: Attributed, request: httpx.Request, response: httpx.Response) -> bool:
    if request.method == "POST":
        run.is_away = response.status_code in UNSERVED
    return request.method == "POST" and response.status_code == 200


class _SyncStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, watch: _Watch) -> None:
        self._stream, self._watch = stream, watch

    def __iter__(self) -> Iterator[bytes]:
        with _noting(self._watch.run):
            for piece in self._stream:
                self._watch.see(piece)
                yield piece

    def close(self) -> None:
        self._watch.end()
        self._stream.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, watch: _Watch) -> None:
        self._stream, self._watch = stream, watch

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _noting(self._watch.run):
            async for piece in self._stream:
                self._watch.see(piece)
                yield piece

    async def aclose(self) -> None:
        self._watch.end()
        await self._stream.aclose()


class RunTransport(httpx.BaseTransport):
    """Sends over a transport that others may share."""

    def __init__(self, inner: httpx.BaseTransport, chats: Chats) -> None:
        self._inner, self._chats = inner, chats

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request, run = self._chats.prepare(request)
        with _noting(run):
            response = self._inner.handle_request(request)
        if run is not None and _is_answered(run, request, response):
            assert isinstance(response.stream, httpx.SyncByteStream)
            response.stream = _SyncStream(response.stream, _Watch(run, response))
        return response

    def close(self) -> None:
        self._inner.close()


class AsyncRunTransport(httpx.AsyncBaseTransport):
    """The same for asyncio."""

    def __init__(self, inner: httpx.AsyncBaseTransport, chats: Chats) -> None:
        self._inner, self._chats = inner, chats

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request, run = self._chats.prepare(request)
        with _noting(run):
            response = await self._inner.handle_async_request(request)
        if run is not None and _is_answered(run, request, response):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _AsyncStream(response.stream, _Watch(run, response))
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def http_client(**options: Any) -> httpx.Client:
    """Return an httpx client whose chats belong to the context's run, for a model object that is never rebuilt.

    options: of httpx.Client, without `transport`.

    >>> import openai
    >>> model = openai.OpenAI(base_url="http://127.0.0.1:8010/v1", api_key="unused", http_client=http_client())
    """
    options.setdefault("timeout", httpx.Timeout(600.0, connect=5.0))
    own = for_transport(options)
    inner = httpx.HTTPTransport(**own) if own else Connections().sync(owned=True)
    return HttpClient(transport=RunTransport(inner, Chats(None, {}, {})), **options)


def async_http_client(**options: Any) -> httpx.AsyncClient:
    """Return the same for asyncio.

    >>> import openai
    >>> url = "http://127.0.0.1:8010/v1"
    >>> model = openai.AsyncOpenAI(base_url=url, api_key="unused", http_client=async_http_client())
    """
    options.setdefault("timeout", httpx.Timeout(600.0, connect=5.0))
    own = for_transport(options)
    inner = httpx.AsyncHTTPTransport(**own) if own else Connections().asynchronous(owned=True)
    return AsyncHttpClient(transport=AsyncRunTransport(inner, Chats(None, {}, {})), **options)
