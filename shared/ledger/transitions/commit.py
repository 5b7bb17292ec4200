"""4, commit: rewarded rows become READY; rows that nobody rewards expire."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, select, update

from shared.experience import State
from shared.ledger.tables import experiences
from shared.ledger.transitions.rows import count_ready, in_scope


def commit(
    connection: Connection,
    *,
    task_id: str | None = None,
    run_id: str | None = None,
    before: float | None = None,
    key_group: str | None = None,
) -> tuple[int, int]:
    """RECORDED → READY for every rewarded row of the scope.

    before: only rows recorded before this moment, Unix seconds. key_group: only rows of this group; None: all.
    Returns: (rows made ready now, rows ready in all).
    """
    where: list[ColumnElement[bool]] = [
        experiences.c.state == State.RECORDED,
        experiences.c.reward.is_not(None),
        in_scope(task_id, run_id),
    ]
    if before is not None:
        where.append(experiences.c.created_at < before)
    if key_group is not None:
        where.append(experiences.c.key_group == key_group)
    committed = connection.execute(update(experiences).where(*where).values(state=State.READY)).rowcount
    return committed, count_ready(connection)


def expire(connection: Connection, *, before: float, at_most: int = 10_000) -> int:
    """RECORDED → DISCARDED for rows without a reward that were recorded before this moment, Unix seconds.

    Returns how many, up to `at_most`, so that no transaction holds the writers up.
    """
    old = (
        select(experiences.c.id)
        .where(experiences.c.state == State.RECORDED, experiences.c.reward.is_(None), experiences.c.created_at < before)
        .order_by(experiences.c.id)
        .limit(at_most)
    )
    unrewarded = (experiences.c.id.in_(old), experiences.c.state == State.RECORDED, experiences.c.reward.is_(None))
    return connection.execute(
        update(experiences).where(*unrewarded).values(state=State.DISCARDED, reason="expired: no reward came in time")
    ).rowcount
