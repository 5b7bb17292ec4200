"""7, update: handles failed updates. Their rows count the failures, and later claims of these rows are smaller.

An update fails if it raises an error, or if its trainer dies in it, for example because the kernel kills the process
for its memory use. The counts are in the ledger, so halving continues after any restart. After the second failure,
claims of these rows are half as large, after the third a quarter (`failures_of_oldest`), until the row at fault is
claimed alone. Its next failure quarantines it. A trajectory that is claimed whole counts as one row.
"""

from __future__ import annotations

from sqlalchemy import Connection, update

from shared.config import RewardConfig
from shared.experience import BatchState, State
from shared.ledger.conditions import is_in
from shared.ledger.connect import lock_rows
from shared.ledger.queries.lease import DEATHS_TOLERATED, held_rows, is_to_blame
from shared.ledger.tables import batches, experiences
from shared.ledger.transitions.late_scores import credit_again, refused_by_lease


def mark_updating(connection: Connection, batch_id: int, *, updating: bool) -> None:
    """Mark that an update with this batch has begun, or that it has ended. A trainer that dies leaves the mark."""
    connection.execute(update(batches).where(batches.c.id == batch_id).values(updating=updating))


def fail_update(connection: Connection, batch_id: int, reason: str, *, rule: RewardConfig | None = None) -> int:
    """After a failed update: LEASED → READY for the batch's rows, or → DISCARDED if they were trained on alone.

    rule: see `give_back`. Returns the number of quarantined rows.
    """
    held = (batches.c.id == batch_id, is_in(batches.c.state, BatchState.LEASED))
    connection.execute(update(batches).where(*held).values(state=BatchState.RETURNED))
    mine = (experiences.c.batch_id == batch_id, is_in(experiences.c.state, State.LEASED))
    lock_rows(connection, experiences.c.id, *mine)
    rows = held_rows(connection, batch_id)
    if is_to_blame(rows):
        quarantine(connection, {row.id: f"the update failed with it alone: {reason}" for row in rows})
        return len(rows)
    failures = experiences.c.failures + 1
    late = refused_by_lease(connection, *mine)
    connection.execute(update(experiences).where(*mine).values(state=State.READY, batch_id=None, failures=failures))
    credit_again(connection, late, rule)
    return 0


def count_death(connection: Connection, batch_id: int) -> None:
    """Count a trainer's death in an update with this batch, which is being released.

    Its rows are locked, and stay LEASED.
    """
    rows = held_rows(connection, batch_id)
    blamed = bool(rows) and min(row.deaths for row in rows) >= DEATHS_TOLERATED
    if blamed and is_to_blame(rows):
        reason = "each trainer died in an update with it alone (out of memory?)"
        quarantine(connection, {row.id: reason for row in rows})
        return
    counts = {"deaths": experiences.c.deaths + 1, "failures": experiences.c.failures + int(blamed)}
    mine = (experiences.c.batch_id == batch_id, is_in(experiences.c.state, State.LEASED))
    connection.execute(update(experiences).where(*mine).values(counts))


def quarantine(connection: Connection, reasons: dict[int, str]) -> None:
    """LEASED → DISCARDED for rows that must not be trained on. They are locked."""
    for row_id, reason in reasons.items():
        connection.execute(
            update(experiences)
            .where(experiences.c.id == row_id, is_in(experiences.c.state, State.LEASED))
            .values(state=State.DISCARDED, reason=f"quarantined: {reason}")
        )
