"""Keys and their roles: chat, feedback (also commits) and admin; and the limits of each key."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import HTTPConnection

from explorer_service.api.errors import ApiError
from explorer_service.api.limits import Limit
from shared.config import ExplorerConfig, KeyConfig
from shared.errors import ConfigError
from shared.ledger.conditions import UNGROUPED

Role = Literal["chat", "feedback", "admin"]
MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; without a name if the explorer has no keys, or from an open network."""

    name: str | None = None
    group: str | None = None  # whose rows its feedback reaches; UNGROUPED: rows without a group; None: all
    limit: Limit = field(default_factory=lambda: Limit(None, None))
    reads: Limit = field(default_factory=lambda: Limit(None, None))  # for GET /status and /versions


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    role: Role
    caller: Caller


class Auth:
    """Checks `Authorization: Bearer KEY`. Without configured keys, every caller has all roles."""

    def __init__(self, config: ExplorerConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._keys = [_read_key(key, environ) for key in config.keys]
        _require_different(self._keys)
        self._open_networks = [ipaddress.ip_network(network) for network in config.open_feedback_from]
        self._anyone = Caller()  # without configured keys
        self._without_key = Caller(group=UNGROUPED)  # from an open network

    def require(self, request: HTTPConnection, *roles: Role, open_to_networks: bool = False) -> Caller:
        """Return the caller. Raises ApiError 401 or 403.

        roles: one of them is required, or admin. open_to_networks: `open_feedback_from` needs no key.
        """
        if not self._keys:
            return self._anyone
        presented = _bearer(request.headers.get("authorization"))
        if presented is None:
            if open_to_networks and self._from_open_network(request):
                return self._without_key
            raise ApiError(
                401, "no key given; send Authorization: Bearer KEY", kind="authentication_error", code="no_key"
            )
        digest = hashlib.sha256(presented.encode("latin-1")).digest()  # the bytes as received
        found: _Key | None = None
        for key in self._keys:  # always all of them, so that the time reveals nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            if open_to_networks and self._from_open_network(request):  # runners may send a placeholder as key
                return self._without_key
            raise ApiError(401, "unknown key", kind="authentication_error", code="invalid_api_key")
        if found.role != "admin" and found.role not in roles:
            raise ApiError(
                403,
                f"a key of role {found.role!r} may not do this; use one of {' or '.join(roles)}",
                kind="permission_error",
                code="wrong_role",
            )
        return found.caller

    def _from_open_network(self, request: HTTPConnection) -> bool:
        if not self._open_networks or request.client is None:
            return False
        if "origin" in request.headers or "sec-fetch-site" in request.headers:
            return False  # a browser: any page that its user opened may have sent this
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)  # how a socket of IPv6 reports a caller of IPv4
        return any(one in network for network in self._open_networks for one in (address, mapped or address))


def _bearer(header: str | None) -> str | None:
    scheme, _, presented = (header or "").partition(" ")
    return presented.strip(" \t") or None if scheme.lower() == "bearer" else None


def doubtful_keys(config: ExplorerConfig) -> list[str]:
    """Return a warning for each feedback key that reaches no rows of chat keys. Logged at startup."""
    chat_groups = {key.group for key in config.keys if key.role == "chat"}
    return [
        f"feedback key {key.label!r} has {'no group' if key.group is None else f'group {key.group!r}'}, but no chat "
        "key has the same, so it reaches none of their rows; set the group of a chat key, or all_groups: true"
        for key in config.keys
        if key.role == "feedback" and not key.all_groups and chat_groups and key.group not in chat_groups
    ]


def _require_different(keys: list[_Key]) -> None:
    """Raise ConfigError if two entries are the same key: its role would depend on their order."""
    names: dict[bytes, str | None] = {}
    for key in keys:
        if key.digest in names:
            raise ConfigError(
                f"explorer.keys: {names[key.digest]!r} and {key.caller.name!r} are the same key; give each its own"
            )
        names[key.digest] = key.caller.name


def _read_key(key: KeyConfig, environ: Mapping[str, str]) -> _Key:
    if key.sha256 is not None:
        digest = bytes.fromhex(key.sha256)
    else:
        assert key.key_env is not None
        secret = environ.get(key.key_env, "").strip()
        if not secret:
            shown = repr(key.key_env) if key.key_env.isupper() else "that key_env names"  # it may be the key itself
            raise ConfigError(f"explorer.keys: environment variable {shown} is not set; set it to the {key.role} key")
        if len(secret) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"explorer.keys: the key in {key.key_env!r} has fewer than {MIN_KEY_LENGTH} characters and can be "
                "guessed; make one with: openssl rand -hex 24"
            )
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
    group = UNGROUPED if key.role == "feedback" and not key.all_groups and key.group is None else key.group
    limit, reads = (Limit(key.requests_per_minute, key.requests_at_once) for _ in range(2))
    return _Key(digest, key.role, Caller(key.label, group, limit, reads))
