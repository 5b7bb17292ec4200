"""An operator decides which versions serve: each gets a share of the chats that name no version.

Without shares, the newest version that may serve gets all of them. Shares hold until an operator changes them, so a
version that is published later waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select, update

from shared.errors import CannotServe
from shared.ledger.connect import lock_rows
from shared.ledger.queries.versions import reason_against_serving, shares_of_traffic
from shared.ledger.tables import versions
from shared.ledger.transitions.versions import note_decision, restore_skipped, retire_shared
from shared.versions import LARGEST_VERSION

_LARGEST_WEIGHT = 1e9


def share_traffic(
    connection: Connection, weights: Mapping[int, float], *, at_most: int, by: str, needed: str = "model.kind: lora"
) -> dict[int, float]:
    """Give versions their shares of the chats that name no version. Returns the shares; their sum is 1.

    weights: from 0 to a billion, in any unit; empty: the newest version that may serve gets all chats.
    at_most: number of versions that an engine can serve at once. needed: what would allow more, in words.
    A version whose share ends after an engine has proven it becomes RETIRED: it has served, and can be returned to.

    Raises CannotServe if there are more of them, or one cannot serve.
    """
    shares = _shares(weights, at_most, needed)
    lock_shares(connection)
    before = shares_of_traffic(connection)
    lock_rows(connection, versions.c.version, versions.c.version.in_({*before, *shares}))
    for version in shares:
        if (reason := reason_against_serving(connection, version)) is not None:
            raise CannotServe(reason)
    restore_skipped(connection, shares, by=by)
    for version in sorted({*before, *shares}):
        share = shares.get(version)
        if share != before.get(version):
            connection.execute(update(versions).where(versions.c.version == version).values(share=share))
            note_decision(connection, version, f"share of the chats: {share or 0:g}", by=by)
    retire_shared(connection, before.keys() - shares.keys(), by=by)
    return shares


def lock_shares(connection: Connection) -> None:
    """Wait until no other transaction changes shares: one of them would not see what the other gives."""
    connection.execute(select(versions.c.version).where(versions.c.version == 0).with_for_update())


def _shares(weights: Mapping[int, float], at_most: int, needed: str) -> dict[int, float]:
    """Return the shares by version, without those of 0. Raises CannotServe."""
    if any(not 0 <= weight <= _LARGEST_WEIGHT for weight in weights.values()):
        raise CannotServe(f"a weight is a number from 0 to {_LARGEST_WEIGHT:g}")
    unknown = [version for version in weights if not 0 <= version <= LARGEST_VERSION]
    if unknown:
        raise CannotServe(f"there is no version {unknown[0]}; see `flywheel versions`")
    total = sum(weights.values())
    if weights and not total:
        raise CannotServe("one of the weights has to be above 0")
    shares = {version: weight / total for version, weight in sorted(weights.items())}
    shares = {version: share for version, share in shares.items() if share}
    if len(shares) > at_most:
        what = "one version" if at_most == 1 else f"{at_most} versions"
        raise CannotServe(f"{len(shares)} versions at once: an engine serves {what}; this needs {needed}")
    return shares


def move_shares(connection: Connection, to: int, *, by: str) -> None:
    """Give all chats to version `to` if a later version has a share of them: those are rejected."""
    later = select(versions.c.version).where(versions.c.share.is_not(None), versions.c.version > to).limit(1)
    if connection.execute(later).first() is not None:
        share_traffic(connection, {to: 1.0}, at_most=1, by=by)
