"""5, claim: batches are released on request, or when their lease expires.

Batches are locked in the order of their ids, and before rows.
"""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from shared.config import RewardConfig
from shared.experience import BatchState, State
from shared.ledger.conditions import is_in
from shared.ledger.connect import database_time, lock_rows
from shared.ledger.tables import batches, experiences, trainers
from shared.ledger.transitions.failures import count_death
from shared.ledger.transitions.late_scores import credit_again, refused_by_lease


def close_empty_batch(connection: Connection, batch_id: int) -> None:
    """LEASED → RETURNED for a batch whose rows were all quarantined."""
    held = (batches.c.id == batch_id, is_in(batches.c.state, BatchState.LEASED))
    connection.execute(update(batches).where(*held).values(state=BatchState.RETURNED))


def extend_lease(connection: Connection, *, owner: str, lease_s: float | None) -> None:
    """Record a trainer's heartbeat, and extend its leases to `lease_s` from now; None: they stay as they are."""
    now = database_time(connection)
    # in the order in which a trainer that publishes locks them
    connection.execute(update(trainers).where(trainers.c.name == owner).values(heartbeat_at=now))
    if lease_s is not None:
        held = (batches.c.owner == owner, batches.c.state == BatchState.LEASED)
        lock_rows(connection, batches.c.id, *held)
        connection.execute(update(batches).where(*held).values(lease_until=now + lease_s))


def give_back(connection: Connection, *, owner: str | None = None, rule: RewardConfig | None = None) -> int:
    """LEASED → READY for an owner's batches or, without an owner, for every batch whose lease has expired.

    rule: by which scores that the lease refused become rewards; None: they do not. Returns the number of rows.
    """
    mine = batches.c.owner == owner if owner is not None else batches.c.lease_until < database_time(connection)
    held = select(batches.c.id).where(batches.c.state == BatchState.LEASED, mine).order_by(batches.c.id)
    # a batch whose lease somebody extends at this moment has not expired
    ids = connection.execute(held.with_for_update(skip_locked=owner is None)).scalars().all()
    if not ids:
        return 0
    returned = update(batches).where(batches.c.id.in_(ids)).values(state=BatchState.RETURNED)
    ended = connection.execute(returned.returning(batches.c.id, batches.c.updating)).all()
    theirs = (experiences.c.batch_id.in_(ids), is_in(experiences.c.state, State.LEASED))
    lock_rows(connection, experiences.c.id, *theirs)
    for batch in ended:
        if batch.updating:
            count_death(connection, batch.id)
    late = refused_by_lease(connection, *theirs)
    count = connection.execute(update(experiences).where(*theirs).values(state=State.READY, batch_id=None)).rowcount
    credit_again(connection, late, rule)
    return count
