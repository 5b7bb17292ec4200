"""Transports over the proxy that the environment names, which a client with a transport of its own does not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from flywheel.connections import LIMITS, proxy_for, tls_context
from flywheel.forks import renew_after_fork


class ByProxy:
    """Transports for the proxies that the environment names, created on first use."""

    def __init__(self, options: dict[str, Any], *, trust_env: bool = True) -> None:
        """options: of the transports; `proxy` is for all URLs. trust_env: whether the environment names proxies."""
        own = {} if options.get("cert") else {"verify": tls_context()}
        self._options = {"limits": LIMITS, **own, **options}
        self._asks = trust_env and "proxy" not in options
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        """Begin without connections."""
        self._by_proxy: dict[str | None, Any] = {}

    def _find(self, make: Callable[..., Any], url: httpx.URL) -> Any:
        proxy = proxy_for(str(url)) if self._asks else self._options.get("proxy")
        if proxy not in self._by_proxy:
            self._by_proxy[proxy] = make(**{**self._options, "proxy": proxy})
        return self._by_proxy[proxy]


class ProxiedTransport(ByProxy, httpx.BaseTransport):
    """Sends over the proxy that the environment names, like a client of httpx without a transport of one's own."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._find(httpx.HTTPTransport, request.url).handle_request(request)
        return response

    def close(self) -> None:
        for one in self._by_proxy.values():
            one.close()


class AsyncProxiedTransport(ByProxy, httpx.AsyncBaseTransport):
    """The same for asyncio."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = self._find(httpx.AsyncHTTPTransport, request.url)
        response: httpx.Response = await transport.handle_async_request(request)
        return response

    async def aclose(self) -> None:
        for one in self._by_proxy.values():
            await one.aclose()
