"""Connections: the transports for a client's chats and calls. Does not know runs and models.

Threads share a pool of httpx. On an event loop, each connection is a transport of its own: at each request, httpx's
pool compares every idle connection with every other one, which takes longer than a chat from about thirty connections
on. A pool of one connection avoids that.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from flywheel.forks import renew_after_fork

_MOST = 1000  # per loop, and for all threads; further requests wait
_IDLE_S = 5.0  # time until an idle connection is closed, as in httpx
LIMITS = httpx.Limits(max_connections=_MOST, max_keepalive_connections=200, keepalive_expiry=_IDLE_S)
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_IDLE_S)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_Origin = tuple[str, str, int | None]
_OF_TRANSPORT = ("verify", "cert", "http1", "http2", "limits", "proxy")


@cache
def tls_context() -> ssl.SSLContext:
    """Created once: reading the certificates takes longer than a chat."""
    return httpx.create_ssl_context()


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for a URL: a client with a transport of its own does not ask."""
    parts, named = urlsplit(url), getproxies()
    found = named.get(parts.scheme) or named.get("all")
    if not found or parts.hostname in _LOOPBACK or proxy_bypass(parts.netloc):
        return None
    return found if "://" in found else f"http://{found}"


def for_transport(options: dict[str, Any]) -> dict[str, Any]:
    """Take out the options that the transport itself needs: a client ignores them, and its proxy would bypass it."""
    return {name: options.pop(name) for name in _OF_TRANSPORT if name in options}


class _Cookies(httpx.Cookies):
    """httpx builds a request and a response of urllib for each response, whether or not it sets a cookie."""

    def extract_cookies(self, response: httpx.Response) -> None:
        if "set-cookie" in response.headers:
            super().extract_cookies(response)


class _WithCookies:
    """A client's property `cookies`, with these cookies."""

    _found: _Cookies

    @property
    def cookies(self) -> httpx.Cookies:
        return self._found

    @cookies.setter
    def cookies(self, cookies: Any) -> None:
        self._found = _Cookies(cookies)


class HttpClient(_WithCookies, httpx.Client):
    """httpx's client, which parses cookies only in responses that set some."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cookies = options.get("cookies")


class AsyncHttpClient(_WithCookies, httpx.AsyncClient):
    """The same for asyncio."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cookies = options.get("cookies")


class Connections:
    """The connections of a client: one pool for threads, and those of each event loop, all created on first use."""

    def __init__(self) -> None:
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Begin without connections."""
        self._lock = threading.Lock()
        self._pool: httpx.HTTPTransport | None = None
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopConnections] = (
            weakref.WeakKeyDictionary()
        )

    def sync(self, *, owned: bool = False) -> httpx.BaseTransport:
        """Return a transport over the threads' pool. owned: closing the transport closes the pool."""
        return _PoolTransport(self, owned)

    def of_threads(self) -> httpx.HTTPTransport:
        """Return the threads' pool."""
        with self._lock:
            if self._pool is None:
                self._pool = httpx.HTTPTransport(limits=LIMITS, verify=tls_context())
            return self._pool

    def asynchronous(self, *, owned: bool = False) -> httpx.AsyncBaseTransport:
        """Return a transport over the running loop's connections. owned: closing it closes them."""
        return _LoopTransport(self, owned)

    def of_loop(self) -> _LoopConnections:
        """Return the connections of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._by_loop:
                self._by_loop[loop] = _LoopConnections(tls_context())
            return self._by_loop[loop]

    def close(self) -> None:
        """Close the threads' pool."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        found = self._by_loop.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.aclose()


class _LoopConnections:
    """The connections of one loop. The last used one is reused first, so that superfluous ones become idle.

    They are closed when the loop ends. Otherwise they would keep it in memory, and their sockets open.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._seats = asyncio.Semaphore(_MOST)
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._idle: defaultdict[_Origin, deque[tuple[float, httpx.AsyncHTTPTransport]]] = defaultdict(deque)
        self._end: AsyncGenerator[None, None] | None = None

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request over an idle or a new connection, which is released when the response's stream is closed."""
        if self._end is None:
            self._end = self._close_at_end()
            await anext(self._end)
        idle = self._idle[request.url.scheme, request.url.host, request.url.port]
        await self._seats.acquire()
        one = idle.pop()[1] if idle else self._new()
        try:
            if idle and idle[0][0] < time.monotonic() - _IDLE_S:
                await self._close(idle.popleft()[1])
            response = await one.handle_async_request(request)
        except BaseException:
            await self._give_up(one)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, partial(self._done, idle, one), partial(self._give_up, one))
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        one = httpx.AsyncHTTPTransport(limits=_ONE, verify=self._tls)
        self._all.add(one)
        return one

    def _done(self, idle: deque[tuple[float, httpx.AsyncHTTPTransport]], one: httpx.AsyncHTTPTransport) -> None:
        idle.append((time.monotonic(), one))
        self._seats.release()

    async def _give_up(self, one: httpx.AsyncHTTPTransport) -> None:
        """Close a connection whose request failed: after a cancellation, its pool may keep its only place for ever."""
        self._seats.release()
        await self._close(one)

    async def _close(self, one: httpx.AsyncHTTPTransport) -> None:
        self._all.discard(one)
        await one.aclose()

    async def aclose(self) -> None:
        """Close all connections, including those in use."""
        if self._end is not None:
            await self._end.aclose()

    async def _close_at_end(self) -> AsyncGenerator[None, None]:
        """A generator that is not finished: a loop closes those before it ends."""
        try:
            yield
        finally:
            self._end = None
            self._idle.clear()
            for one in list(self._all):
                await self._close(one)


class _Stream(httpx.AsyncByteStream):
    """A response's stream, with callbacks for its close and for a close that fails; one of them is called once."""

    def __init__(
        self, stream: httpx.AsyncByteStream, done: Callable[[], None], give_up: Callable[[], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._done: Callable[[], None] | None = done
        self._give_up = give_up

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        done, self._done = self._done, None
        try:
            await self._stream.aclose()
        except BaseException:
            if done is not None:
                await self._give_up()
            raise
        if done is not None:
            done()


class _LoopTransport(httpx.AsyncBaseTransport):
    def __init__(self, connections: Connections, owned: bool) -> None:
        self._connections, self._owned = connections, owned

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._connections.of_loop().send(request)

    async def aclose(self) -> None:
        if self._owned:
            await self._connections.aclose()


class _PoolTransport(httpx.BaseTransport):
    def __init__(self, connections: Connections, owned: bool) -> None:
        self._connections, self._owned = connections, owned

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._connections.of_threads().handle_request(request)

    def close(self) -> None:
        if self._owned:
            self._connections.close()
