"""Names of engines in the ledger: by their urls, and the own names of engines that have one."""

from __future__ import annotations

from sqlalchemy import Connection

from shared.config import EngineAddress, is_loopback
from shared.ledger import queries
from shared.process import machine_name

_OWN = "engine "  # prefix of own names


def engine_key(engine: EngineAddress) -> str:
    """Return the engine's name by its url. A loopback url is another engine on each machine."""
    return f"{machine_name()} {engine.plain_url}" if is_loopback(engine.host) else engine.plain_url


def own_name(identity: str | None) -> str:
    """Return an engine's own name, which does not depend on the url; empty if it has none."""
    return "" if identity is None else f"{_OWN}{identity}"


def who_owns(connection: Connection, name: str, key: str) -> str:
    """Return which explorer owns the engine with that own name, by another url than `key`, and what to do.

    Empty if it has the same url: one of its two leases may have ended a moment before the other.
    """
    row, same = queries.read_engine(connection, name), queries.read_engine(connection, key)
    owner = "" if row is None or row.owner is None else row.owner
    if same is not None and same.owner == owner:
        return ""
    urls = sorted(url for url in queries.owned_engines(connection, owner) if not url.startswith(_OWN))
    return (
        f"explorer {owner} owns it by another url ({' or '.join(urls)}); name the engine by one url in the files of "
        "all explorers, and not by a loopback one if they are on several machines"
    )
