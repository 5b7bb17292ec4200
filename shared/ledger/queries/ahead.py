"""Versions and rows that no saved state contains yet, with `trainer.save_every` above 1.

A trainer processes one batch after the other, and a version contains everything that the trainer claimed before it. So
the times of claims and versions determine which rows a version contains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, select

from shared.experience import BatchState, State, VersionState
from shared.ledger.conditions import is_in
from shared.ledger.tables import batches, experiences, trainers, versions


@dataclass(slots=True)
class Ahead:
    """Of one trainer: the newest version that no state contains, and the rows in such versions."""

    step: int
    version: int
    made_at: list[float] = field(default_factory=list)  # times of these versions, oldest first
    rows: list[tuple[float, int]] = field(default_factory=list)  # time of their first version, number of rows

    @property
    def waiting(self) -> int:
        """Number of rows that were trained on, but stay LEASED until a state contains them."""
        return sum(count for _, count in self.rows)

    def trained_since(self, since: float) -> int:
        """Number of these rows in versions that were made after this time."""
        return sum(count for made_at, count in self.rows if made_at > since)


def trained_ahead(connection: Connection) -> dict[str, Ahead]:
    """Return this by the trainer's name. Trainers whose newest version is in a saved state are left out."""
    given_up = (VersionState.RESERVED, VersionState.REJECTED)
    columns = (versions.c.writer, versions.c.step, versions.c.version, versions.c.created_at)
    oldest = select(func.min(trainers.c.version)).scalar_subquery()  # older versions are not even read
    later = (versions.c.version > oldest, versions.c.version > trainers.c.version, versions.c.state.not_in(given_up))
    made = select(*columns).join(trainers, trainers.c.name == versions.c.writer).where(*later)
    found: dict[str, Ahead] = {}
    for writer, step, version, created_at in connection.execute(made.order_by(versions.c.version)):
        ahead = found.setdefault(writer, Ahead(step, version))
        ahead.step, ahead.version = step, version
        ahead.made_at.append(created_at)
    if not found:
        return found
    held = (is_in(batches.c.state, BatchState.LEASED), is_in(experiences.c.state, State.LEASED))
    counted = select(batches.c.owner, batches.c.created_at, func.count())
    counted = counted.join(experiences, experiences.c.batch_id == batches.c.id).where(*held)
    leased: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for owner, claimed_at, count in connection.execute(counted.group_by(batches.c.id)):
        leased[owner].append((claimed_at, count))
    for name, ahead in found.items():
        for claimed_at, count in leased[name]:
            place = bisect_left(ahead.made_at, claimed_at)
            if place < len(ahead.made_at):  # else it is being trained on
                ahead.rows.append((ahead.made_at[place], count))
    return found
