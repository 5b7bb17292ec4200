"""Operators' calls: which versions serve. They need a key with the role admin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flywheel.errors import ConfigError
from flywheel.wire import Ask, call_json, check_number, encode

if TYPE_CHECKING:
    from flywheel.async_client import AsyncClient
    from flywheel.client import Client


def _checked(name: str, version: object) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ConfigError(f"{name}={version!r}: give the number of a version, as client.versions() has it")
    return version


def _traffic(weights: Mapping[int, float] | None) -> Ask:
    if weights is None:
        return Ask("PUT", "/traffic", encode({"weights": None}))
    for version, weight in weights.items():
        _checked("version", version)
        check_number(f"weights[{version}]", weight)
    if None in weights.values() or not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ConfigError(f"weights={dict(weights)!r}: give each version a share of at least 0, one of them more")
    return Ask("PUT", "/traffic", encode({"weights": {str(version): weight for version, weight in weights.items()}}))


def _promote(version: int) -> Ask:
    return Ask("POST", f"/versions/{_checked('version', version)}/promote", b"{}")


def _rollback(to: int, again: bool) -> Ask:
    return Ask("POST", "/rollback", encode({"to": _checked("to", to), **({"again": True} if again else {})}))


class Admin:
    """Client.admin. Refused: the explorer cannot do it, with its reason.

    >>> import flywheel
    >>> flywheel.Client("http://127.0.0.1:8010").admin.traffic({12: -1.0})
    Traceback (most recent call last):
    flywheel.errors.ConfigError: weights={12: -1.0}: give each version a share of at least 0, one of them more
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def _call(self, ask: Ask) -> dict[str, Any]:
        return self._client.drive(call_json(ask, self._client.explorer.retry_s))

    def traffic(self, weights: Mapping[int, float] | None) -> dict[str, Any]:
        """Divide the chats that name no version among versions: {12: 0.9, 13: 0.1}. None: the newest one gets all.

        Several versions at once need adapters (model.kind: lora).
        """
        return self._call(_traffic(weights))

    def promote(self, version: int) -> dict[str, Any]:
        """Send all chats that name no version to this one. Later versions wait until they are promoted."""
        return self._call(_promote(version))

    def rollback(self, to: int, *, again: bool = False) -> dict[str, Any]:
        """Go back to an earlier version: all later ones are rejected, and trainers start again from it.

        again: train again on the rows that only rejected versions were trained on.
        """
        return self._call(_rollback(to, again))


class AsyncAdmin:
    """AsyncClient.admin: the same methods, awaited."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def _call(self, ask: Ask) -> dict[str, Any]:
        return await self._client.drive(call_json(ask, self._client.explorer.retry_s))

    async def traffic(self, weights: Mapping[int, float] | None) -> dict[str, Any]:
        """The same as Admin.traffic."""
        return await self._call(_traffic(weights))

    async def promote(self, version: int) -> dict[str, Any]:
        """The same as Admin.promote."""
        return await self._call(_promote(version))

    async def rollback(self, to: int, *, again: bool = False) -> dict[str, Any]:
        """The same as Admin.rollback."""
        return await self._call(_rollback(to, again))
