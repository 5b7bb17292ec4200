"""Names of engines in the ledger: by their urls, and the own names of engines that have one."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from shared.config import EngineAddress, is_loopback
from shared.ledger import queries, transitions
from shared.process import machine_name

_OWN = "engine "  # prefix of own names


def engine_key(engine: EngineAddress) -> str:
    """Return the engine's name by its url. A loopback url is another engine on each machine."""
    return f"{machine_name()} {engine.plain_url}" if is_loopback(engine.host) else engine.plain_url


def own_name(identity: str | None) -> str:
    """Return an engine's own name, which does not depend on the url; empty if it has none."""
    return "" if identity is None else f"{_OWN}{identity}"


class OwnNames:
    """The own names of this explorer's engines, as far as they are known and answer; by url.

    If two of its urls are one engine, the one whose name was noted first counts, and the other one is its twin.
    """

    def __init__(self, engines: Iterable[EngineAddress]) -> None:
        self._engines = {engine.url: engine.name for engine in engines}
        self._noted: dict[str, str] = {}  # by engine url, the earliest first; empty for an engine that has none

    def get(self, url: str) -> str:
        """Return the name; empty if the engine has none, or it is not known."""
        return self._noted.get(url, "")

    def note(self, url: str, name: str) -> None:
        """Note a name, after those that are known."""
        self._noted.pop(url, None)
        self._noted[url] = name

    def forget(self, url: str) -> None:
        """Forget a name; the next one with the same name counts then."""
        self._noted.pop(url, None)

    def acquire(self, connection: Connection, url: str, explorer: str) -> bool:
        """Acquire the name, or renew its lease. Returns whether nobody has it by another url."""
        name = self.get(url)
        return not name or (not self.twin(url) and transitions.acquire_engine(connection, name, explorer))

    def owner(self, connection: Connection, url: str, key: str) -> str:
        """Return who has the name by another url than `key`, in words; empty: an explorer with the same url."""
        return self.twin(url) or who_owns(connection, self.get(url), key)

    def leased(self, url: str) -> str:
        """Return the name that belongs to the engine's lease; empty if it has none, or belongs to its twin's."""
        return "" if self.twin(url) else self.get(url)

    def twin(self, url: str) -> str:
        """Return which other engine of this explorer is the same one, in words; empty if there is none."""
        name, noted = self.get(url), list(self._noted.items())  # a copy: the writer's thread calls this, too
        first = next(other for other, one in noted if one == name) if name else url
        if first == url:
            return ""
        return f"engine {self._engines[first]} of this file is the same engine; name it once in explorer.engines"


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
