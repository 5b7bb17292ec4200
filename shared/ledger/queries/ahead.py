"""Versions and rows that no saved state contains yet, with `trainer.save_every` above 1.

A trainer processes one batch after the other, and a version contains everything that the trainer claimed before it. So
the times of claims and versions determine which rows a version contains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from shared.experience import BatchState, State, VersionState
from shared.ledger.conditions import AnyRow, is_in
from shared.ledger.tables import batches, experiences, trainers, versions


@dataclass(slots=True)
class Ahead:
    """Of one trainer: the newest version that no state contains, and the rows in such versions."""

    step: int
    version: int
    rows: list[tuple[float, int]]  # time of their first version, number of rows

    @property
    def waiting(self) -> int:
        """Number of rows that were trained on, but stay LEASED until a state contains them."""
        return sum(count for _, count in self.rows)

    def trained_since(self, since: float) -> int:
        """Number of these rows in versions that were made after this time."""
        return sum(count for made_at, count in self.rows if made_at > since)


def trained_ahead(connection: Connection) -> dict[str, Ahead]:
    """Return this by the trainer's name. Trainers whose newest version is in a saved state are left out.

    A REJECTED version counts only while the trainer holds rows that it contains: an engine rejected it, and the trainer
    goes on from it. If the trainer withdrew it, the rows were released.
    """
    columns = (versions.c.writer, versions.c.step, versions.c.version, versions.c.created_at, versions.c.state)
    oldest = select(func.min(trainers.c.version)).scalar_subquery()  # older versions are not even read
    published = versions.c.state != VersionState.RESERVED
    later = (versions.c.version > oldest, versions.c.version > trainers.c.version, published)
    query = select(*columns).join(trainers, trainers.c.name == versions.c.writer).where(*later)
    made: dict[str, list[AnyRow]] = defaultdict(list)
    for row in connection.execute(query.order_by(versions.c.version)):
        made[row.writer].append(row)
    if not made:
        return {}
    leased = _leased_rows(connection)
    found: dict[str, Ahead] = {}
    for name, rows in made.items():
        made_at = [row.created_at for row in rows]
        places = [(bisect_left(made_at, claimed_at), count) for claimed_at, count in leased[name]]
        held = {place for place, _ in places if place < len(rows)}  # others are being trained on
        counted = [row for place, row in enumerate(rows) if row.state != VersionState.REJECTED or place in held]
        if counted:
            waiting = [(made_at[place], count) for place, count in places if place in held]
            found[name] = Ahead(counted[-1].step, counted[-1].version, waiting)
    return found


def _leased_rows(connection: Connection) -> dict[str, list[tuple[float, int]]]:
    """Return the time and the number of rows of each leased batch, by the trainer's name."""
    held = (is_in(batches.c.state, BatchState.LEASED), is_in(experiences.c.state, State.LEASED))
    counted = select(batches.c.owner, batches.c.created_at, func.count())
    counted = counted.join(experiences, experiences.c.batch_id == batches.c.id).where(*held)
    leased: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for owner, claimed_at, count in connection.execute(counted.group_by(batches.c.id)):
        leased[owner].append((claimed_at, count))
    return leased
