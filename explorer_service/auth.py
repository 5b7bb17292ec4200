"""Keys and roles: who may chat, who may give feedback and commit, who may operate."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from typing import Literal

from starlette.requests import HTTPConnection

from explorer_service.errors import ApiError
from shared.config import ExplorerConfig
from shared.errors import ConfigError

Role = Literal["chat", "feedback", "admin"]


class Auth:
    """Checks `Authorization: Bearer KEY`. With no keys configured everyone on loopback may do everything."""

    def __init__(self, config: ExplorerConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._digests: list[tuple[bytes, str, Role]] = []
        for key in config.keys:
            secret = environ.get(key.key_env, "")
            if not secret:
                raise ConfigError(
                    f"explorer.keys: environment variable {key.key_env!r} is not set; set it to the {key.role} key"
                )
            self._digests.append((hashlib.sha256(secret.encode()).digest(), key.key_env, key.role))
        self._open_networks = [ipaddress.ip_network(network) for network in config.open_feedback_from]

    def require(self, request: HTTPConnection, *roles: Role) -> str | None:
        """The name of the caller's key (None without keys). Raises ApiError 401 or 403.

        roles: any of these may pass; admin always may.
        """
        if not self._digests:
            return None
        if "feedback" in roles and self._from_open_network(request):
            return None
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise ApiError(
                401, "no key given; send Authorization: Bearer KEY", kind="authentication_error", code="no_key"
            )
        digest = hashlib.sha256(presented.strip().encode("utf-8", "surrogateescape")).digest()
        name, role = "", None
        for known, key_name, key_role in self._digests:  # always all of them: the time taken says nothing
            if hmac.compare_digest(known, digest):
                name, role = key_name, key_role
        if role is None:
            raise ApiError(401, "this key is not known here", kind="authentication_error", code="invalid_api_key")
        if role != "admin" and role not in roles:
            raise ApiError(
                403,
                f"a key of role {role!r} may not do this; use one of {' or '.join(roles)}",
                kind="permission_error",
                code="wrong_role",
            )
        return name

    def _from_open_network(self, request: HTTPConnection) -> bool:
        if not self._open_networks or request.client is None:
            return False
        try:
            address = ipaddress.ip_address(request.client.host)
        except ValueError:
            return False
        return any(address in network for network in self._open_networks)
