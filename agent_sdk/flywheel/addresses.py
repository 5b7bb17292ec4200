"""Addresses: the explorer's origin, and runs in the paths of its chats."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

import httpx


def without_credentials(url: str) -> str:
    """Return an address as a message may show it.

    >>> without_credentials("https://me:secret@host:8010/flywheel")
    'https://host:8010/flywheel'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def naming(url: httpx.URL, task_id: str, run_id: str) -> httpx.URL:
    """Return a chat's address with the run in its path, where every character can be encoded; others unchanged."""
    path = url.raw_path
    at = path.rfind(b"/v1/" if b"/v1/" in path else b"/chat")
    if at < 0 or b"/run/" in path[:at]:  # no chat, or its address names a run
        return url
    return url.copy_with(raw_path=path[:at] + run_path(task_id, run_id).encode() + path[at:])


def run_path(task_id: str, run_id: str) -> str:
    """Return the path that names a run, which stands before /v1."""
    return f"/run/{quote(task_id, safe='')}/{quote(run_id, safe='')}"


def is_for(url: httpx.URL, origin: str) -> bool:
    """Whether a request goes to an explorer."""
    return _origin(url) == origin


def origin_of(url: str) -> str:
    """Return scheme://host:port of an address, always with the port."""
    return _origin(httpx.URL(url))


def _origin(url: httpx.URL) -> str:
    port = url.port if url.port is not None else {"http": 80, "https": 443}.get(url.scheme)
    return f"{url.scheme}://{url.host}:{port}"
