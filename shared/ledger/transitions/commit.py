"""4, commit: trajectories with signals become READY; rows without signals expire.

A commit takes trajectories whole: all rows of a trajectory that are recorded at that time become READY with the row
that has a signal. A row that is recorded later waits for a signal about it, or about the whole again. A signal about a
row that was trained on another lesson makes it READY again for the new lesson alone; a late reward takes the rest of
its trajectory along if no reward has acted on it yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, exists, func, not_, or_, select, text, update

from shared.experience import State, TrajectoryKey, trajectory_key
from shared.ledger.conditions import AnyRow, in_group, in_parts, in_scope, in_trajectories, is_in, names_a_run
from shared.ledger.connect import database_time, lock_rows
from shared.ledger.queries.rows import count_ready
from shared.ledger.tables import WAITS, experiences
from shared.reward import EVERY_LESSON, Lesson

_AT_ONCE = 100  # rows with signals whose trajectories become READY together
_EXPIRED_AT_ONCE = 2_000  # rows
_LARGEST_ID = 2**63 - 1
_COLUMNS = ("id", "task_id", "run_id", "key_group", "conversation_id", "state", "teaches", "taught", "feedback_key")
_MAY_WAIT = (State.RECORDED, State.CONSUMED)


def commit(connection: Connection, **scope: Any) -> tuple[int, int]:
    """RECORDED or CONSUMED → READY for the scope, in one transaction; arguments: see `commit_part`.

    Returns (rows made READY now, total READY rows).
    """
    committed = 0
    last_id: int | None = 0
    while last_id is not None:
        count, last_id = commit_part(connection, **scope, after_id=last_id)
        committed += count
    return committed, count_ready(connection)


def commit_part(
    connection: Connection,
    *,
    task_id: str | None = None,
    run_id: str | None = None,
    before: float | None = None,
    key_group: str | None = None,
    after_id: int = 0,
    at_most: int = 500,
) -> tuple[int, int | None]:
    """RECORDED or CONSUMED → READY for some rows of the scope with signals that have not acted yet, and for the rest of
    their trajectories.

    before: only rows recorded before this time, Unix seconds. key_group: only rows that in_group() finds for it.
    after_id: where the previous call ended. at_most: rows, so that no transaction blocks writers for long; exceeded if
    the last trajectories would be split otherwise.
    Returns (rows made READY now, where the next call starts; None at the end).
    """
    mine: list[ColumnElement[bool]] = [in_group(key_group)]
    if before is not None:
        mine.append(experiences.c.created_at < before)
    scope = (*mine, in_scope(task_id, run_id), experiences.c.id > after_id)
    query = select(*(experiences.c[name] for name in _COLUMNS)).where(text(WAITS), *scope).order_by(experiences.c.id)
    rows = connection.execute(query.limit(at_most)).all()
    committed = 0
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        committed += _make_ready(connection, part, mine)
        if committed >= at_most:
            return committed, part[-1].id
    return committed, rows[-1].id if len(rows) == at_most else None


def _make_ready(connection: Connection, rows: Sequence[AnyRow], where: Sequence[ColumnElement[bool]]) -> int:
    """Make these rows, which have signals, and the rest of their trajectories READY, as far as `where` allows."""
    rewarded_last = sorted(rows, key=lambda row: (bool(row.teaches & Lesson.REWARD), row.id))
    spoke: dict[TrajectoryKey, str | None] = {trajectory_key(row): row.feedback_key for row in rewarded_last}
    rewarded = {trajectory_key(row) for row in rows if row.teaches & Lesson.REWARD}
    of_key: dict[str | None, list[int]] = defaultdict(list)  # rows without signals, by their trajectory's key
    spoken_of = {row.id for row in rows}
    query = select(*(experiences.c[name] for name in _COLUMNS)).where(_still_in(*_MAY_WAIT), *where)
    for together in in_trajectories(spoke):
        for row in connection.execute(query.where(together)):
            if row.teaches:
                spoken_of.add(row.id)
            elif row.state == State.RECORDED or (trajectory_key(row) in rewarded and not row.taught & Lesson.REWARD):
                of_key[spoke[trajectory_key(row)]].append(row.id)
    for mine in in_parts(experiences.c.id, sorted(spoken_of.union(*of_key.values()))):
        lock_rows(connection, experiences.c.id, mine)
    still = (_still_in(*_MAY_WAIT), experiences.c.taught != EVERY_LESSON)  # not erased meanwhile
    committed = _set(connection, sorted(spoken_of), *still, experiences.c.teaches != 0, state=State.READY)
    for key, others in of_key.items():  # they count towards this key's share of a batch
        committed += _set(connection, others, *still, state=State.READY, feedback_key=key)
    return committed


def _set(connection: Connection, ids: Sequence[int], *where: ColumnElement[bool], **values: str | None) -> int:
    """Update those of these rows, which are locked, that meet the conditions. Returns their number."""
    parts = [update(experiences).where(mine, *where).values(values) for mine in in_parts(experiences.c.id, ids)]
    return sum(connection.execute(part).rowcount for part in parts)


def _still_in(*states: State) -> ColumnElement[bool]:
    return or_(*(is_in(experiences.c.state, state) for state in states))


def expire(connection: Connection, *, before: float) -> int:
    """RECORDED → DISCARDED for rows recorded before this time, Unix seconds, that no commit would make READY.

    Returns their number, up to _EXPIRED_AT_ONCE, so that no transaction blocks writers for long.
    """
    silent = experiences.c.teaches == 0
    recorded = experiences.c.state == State.RECORDED
    now = database_time(connection)  # a row from the future, of a clock that is ahead, is not the first young one
    young = select(experiences.c.id).where(recorded, experiences.c.created_at.between(before, now))
    first_young = young.order_by(experiences.c.id).limit(1).scalar_subquery()  # the rows after it are not read
    older = experiences.c.id < func.coalesce(first_young, _LARGEST_ID)
    old = (recorded, silent, older, experiences.c.created_at < before, *_has_no_taught_mate())
    query = select(experiences.c.id).where(*old).order_by(experiences.c.id).limit(_EXPIRED_AT_ONCE)
    reason = "expired: nothing that is learned from was said in time"
    ids = connection.execute(query).scalars().all()
    for mine in in_parts(experiences.c.id, ids):
        lock_rows(connection, experiences.c.id, mine)
    return _set(connection, ids, _still_in(State.RECORDED), silent, state=State.DISCARDED, reason=reason)


def _has_no_taught_mate() -> tuple[ColumnElement[bool], ...]:
    """Rows whose trajectory has no other row with signals that waits for a commit."""
    other = experiences.alias("other")
    waits = (other.c.state.in_(_MAY_WAIT), other.c.teaches != 0)
    names = (other.c.task_id == experiences.c.task_id, other.c.run_id == experiences.c.run_id)
    same_run = (*names, other.c.key_group.is_not_distinct_from(experiences.c.key_group))
    same_conversation = (other.c.conversation_id == experiences.c.conversation_id, not_(names_a_run(other)))
    in_run = exists().where(*waits, *same_run).correlate(experiences)
    in_conversation = exists().where(*waits, *same_conversation).correlate(experiences)
    return not_(in_run), not_(in_conversation & not_(names_a_run()))
