"""Shares: while an operator has divided the chats among several adapter versions, choose one for each chat.

All turns of a run, and all of a conversation, get the same version as long as it has a share: what is compared later
are whole runs. Everything else is assigned by its message id, which is random.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from explorer_service.ledger_reader import LedgerReader
from explorer_service.reload.poller import VersionPoller
from shared.errors import LedgerError
from shared.ledger.queries import version_of_exchange


class Shares:
    """Chooses a version for chats that name none."""

    def __init__(self, poller: VersionPoller, reader: LedgerReader) -> None:
        self._poller = poller
        self._reader = reader

    @property
    def divided(self) -> bool:
        """Whether several versions have shares."""
        return bool(self._poller.shares)

    async def choose(self, msg_id: str, task: str | None, run: str | None, extends: Sequence[bytes]) -> int | None:
        """Return the version of a chat; None: the leading one. extends: digests of exchanges that it may continue."""
        shares = self._poller.shares
        if run is not None:
            return draw(shares, f"{task or ''}\0{run}")
        if extends:
            try:
                before = await self._reader.read(lambda connection: version_of_exchange(connection, extends))
            except LedgerError:  # the answer does not depend on it; recording reports the outage
                before = None
            if before in shares:
                return before
        return draw(shares, msg_id)


def draw(shares: Mapping[int, float], name: str) -> int | None:
    """Return the version for a name, by weighted rendezvous hashing; None without shares.

    When shares change, only as many names move as have to (Schindelhauer and Schomaker 2005, "Weighted distributed
    hash tables").
    """
    return max(shares, key=lambda version: shares[version] / -math.log(_fraction(f"{version}\0{name}")), default=None)


def _fraction(name: str) -> float:
    """Return a number above 0 and below 1 that depends on the name only, and is distributed evenly."""
    number = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6).digest())
    return (number + 0.5) / 2**48
