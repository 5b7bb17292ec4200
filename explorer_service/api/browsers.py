"""Refuse requests of web pages to an explorer without keys, unless its own address served the page.

A browser on the explorer's machine sends requests for any page that its user opens, also to loopback. Three properties
reveal such a request: headers in which the browser names the page's site; a Host that is not the explorer's (DNS
rebinding: the page's own name resolves to this machine); and a body that is not JSON, because a browser sends JSON
across sites only with the explorer's consent (CORS).
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from explorer_service.api.errors import ApiError
from shared.config import is_loopback

_OWN_SITE = ("same-origin", "none")  # Sec-Fetch-Site of the explorer's own pages, and of a URL that the user typed
_WITH_BODY = ("POST", "PUT")


class BrowserGuard:
    """Middleware that refuses, with 403 or 415, requests that a page of another site makes a browser send."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()) -> None:
        """allowed_hosts: the explorer's names besides loopback, without a port."""
        self._app = app
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._known: set[bytes] = set()  # Host headers that were accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refuse(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refuse(self, scope: Scope) -> ApiError | None:
        host = origin = site = content_type = None
        has_body = False
        for name, value in scope["headers"]:
            if name == b"host":
                if value not in self._known and not self._is_ours(value):
                    reason = f"Host {value.decode('latin-1')} is not this explorer's"
                    return _forbidden(f"{reason}; add it to explorer.allowed_hosts", "foreign_host")
                host = value
            elif name == b"content-type":
                content_type = value
            elif name == b"content-length":
                has_body = value != b"0"
            elif name == b"transfer-encoding":
                has_body = True
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").strip().lower()
        if site is not None and site not in _OWN_SITE:
            return _cross_site(f"Sec-Fetch-Site: {site}")
        if origin is not None and (host is None or origin.partition(b"://")[2].lower() != host.lower()):
            return _cross_site(f"Origin: {origin.decode('latin-1')}")
        if has_body and scope["method"] in _WITH_BODY and not _is_json(content_type):
            return ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
        return None

    def _is_ours(self, value: bytes) -> bool:
        try:
            host = urlsplit("//" + value.decode("ascii")).hostname or ""
        except ValueError:
            return False
        host = host.rstrip(".")
        ours = is_loopback(host) or host.endswith(".localhost") or host in self._allowed_hosts
        if ours and len(self._known) < 100:
            self._known.add(value)
        return ours


def _is_json(content_type: bytes | None) -> bool:
    if content_type is None or content_type == b"application/json":
        return content_type is not None
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _cross_site(header: str) -> ApiError:
    return _forbidden(
        f"web pages of other sites may not use this explorer ({header}); configure explorer.keys", "cross_site"
    )


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)
