"""5, claim: lease READY rows to a trainer as a batch. release.py ends the lease."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any, Literal

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    Select,
    Update,
    and_,
    case,
    func,
    insert,
    literal,
    not_,
    select,
    union_all,
    update,
)

from shared.experience import BatchState, State, VersionState, choice_name
from shared.ledger.conditions import in_parts, is_in, is_ready, names_a_run, need_not_wait, run_of_task
from shared.ledger.connect import database_time
from shared.ledger.queries.lease import equal_prompts, held_rows, other_turns, rewarded_rows
from shared.ledger.tables import batches, experiences, signals, versions
from shared.reward import Lesson

_IS_READY = is_in(experiences.c.state, State.READY)
_UNREWARDED = experiences.c.teaches.bitwise_and(int(~Lesson.REWARD))  # the lessons to act, except the reward
_IS_WRITTEN = experiences.c.teaches.bitwise_or(experiences.c.taught).bitwise_and(int(Lesson.DEMONSTRATION)) != 0
WHOLE_GROUP = 1000  # rows
Whole = Literal["trajectory", "task"]


def claim(
    connection: Connection,
    *,
    owner: str,
    at_least: int,
    at_most: int,
    lease_s: float,
    share_per_key: float = 1.0,
    after_id: int = 0,
    group_rows: int = WHOLE_GROUP,
    whole: Whole = "trajectory",
    runs_of_task: int = 1,
    wait_s: float | None = None,
    next_messages: bool = False,
    at_most_behind: int | None = None,
) -> int | None:
    """READY → LEASED for the oldest rows, as one batch of `owner`. A trajectory's READY rows are claimed together.

    at_most: rows; a batch exceeds it if its last trajectory would be split otherwise.
    group_rows: largest number of rows that are claimed together; a longer trajectory is claimed in parts, and of a task
    with more rows the runs that fit.
    whole: unit of the claim: trajectories, or all runs of a task, and all choices of a message without a task.
    runs_of_task: leave a run with a reward while its task has fewer READY ones, until their last signal is older than
    `wait_s`; None: without limit. A row that failed twice does not wait.
    share_per_key: largest part of `at_most` whose rewards one key has set; this limit may split a trajectory.
    next_messages: whether the user's next message is learned from, if the row with it is in the batch.
    after_id: start after this row; older rows of a trajectory are claimed with it.
    at_most_behind: leave rows that `discard_stale` would discard, wherever they are; None: none.
    Returns the batch's id, or None, and changes nothing, if fewer than `at_least` rows are available.
    """
    eligible: list[ColumnElement[bool]] = [_IS_READY]
    if at_most_behind is not None:
        eligible.append(not_(_is_stale(at_most_behind)))
    now = database_time(connection)
    eligible += need_not_wait(runs_of_task, None if wait_s is None else now - wait_s)
    if share_per_key < 1:
        eligible.append(experiences.c.id.in_(_first_of_each_key(max(1, int(share_per_key * at_most)), eligible)))
    batch = {"owner": owner, "state": BatchState.LEASED, "lease_until": now + lease_s, "created_at": now}
    oldest = _oldest(eligible, at_most, after_id)
    mates = _mates(oldest.with_for_update(skip_locked=True), eligible, group_rows, whole)
    batch_id = _claim_mates(connection, batch, mates, max(at_least, 1), at_most)
    if batch_id is not None:
        _choose_lessons(connection, batch_id, next_messages)
    return batch_id


def _claim_mates(connection: Connection, batch: dict[str, Any], mates: CTE, at_least: int, at_most: int) -> int | None:
    if connection.dialect.name == "postgresql":
        statement = _claim_in_one_statement(batch, mates, at_least, at_most)
        claimed: int | None = connection.execute(statement).scalars().first()
        return claimed
    ids = connection.execute(_whole_trajectories(mates, at_most)).scalars().all()
    if len(ids) < at_least:
        return None
    batch_id: int = connection.execute(insert(batches).values(batch).returning(batches.c.id)).scalar_one()
    for mine in in_parts(experiences.c.id, ids):
        leased = {"state": State.LEASED, "batch_id": batch_id, "acts": experiences.c.teaches}
        connection.execute(update(experiences).where(mine).values(leased))
    return batch_id


def _choose_lessons(connection: Connection, batch_id: int, next_messages: bool) -> None:
    """Set the lessons that act on each row: those that have not acted yet; for rewards see `rewarded_rows`.

    Later signals about a row have larger ids in the log, because its rows are locked.
    """
    newest = select(func.max(signals.c.id))
    before = select(batches.c.last_signal).where(batches.c.id < batch_id).order_by(batches.c.id.desc()).limit(1)
    # the newest signals may be deleted: numbers continue after the last batch's, which must not be smaller
    last_signal = max(connection.execute(query).scalar() or 0 for query in (newest, before))
    connection.execute(update(batches).where(batches.c.id == batch_id).values(last_signal=last_signal))
    rows = held_rows(connection, batch_id)
    continued = {row.parent_id for row in rows if row.parent_id is not None} if next_messages else set()
    taught = [(row, row.teaches) for row in rows] + [(row, 0) for row in other_turns(connection, rows)]
    rewarded = rewarded_rows(taught, partial(equal_prompts, connection))
    more: dict[int, list[int]] = defaultdict(list)  # rows with further lessons than those of their own signals
    for row in rows:
        acts = row.teaches
        if row.id in rewarded and not row.taught & Lesson.REWARD:
            acts |= Lesson.REWARD
        if choice_name(row.msg_id, row.choice) in continued:
            acts |= Lesson.NEXT_MESSAGE & ~row.taught
        if acts != row.teaches:
            more[acts].append(row.id)
    for acts, ids in more.items():
        for mine in in_parts(experiences.c.id, ids):
            connection.execute(update(experiences).where(mine).values(acts=int(acts)))


def _oldest(eligible: list[ColumnElement[bool]], at_most: int, after_id: int) -> Select[Any]:
    """Select the rows whose order determines the order of trajectories."""
    columns = (experiences.c[name] for name in ("id", "msg_id", "key_group", "task_id", "run_id", "conversation_id"))
    here = [*eligible, *is_ready(after_id)]
    return select(*columns).where(*here).order_by(experiences.c.id).limit(at_most)


def _mates(oldest: Select[Any], eligible: list[ColumnElement[bool]], group_rows: int, whole: Whole) -> CTE:
    """Select the rows of the oldest rows' trajectories, with the first row of each.

    Of a long trajectory, these are the oldest rows; of a task, the oldest runs that fit. A row without a run and a
    conversation is alone, or with the other choices of its message.
    """
    rows = oldest.cte("oldest")
    in_task = rows.c.task_id.is_not(None) if whole == "task" else names_a_run(rows)
    in_conversation = not_(in_task) & rows.c.conversation_id.is_not(None)
    task = ("task_id",) if whole == "task" else ("task_id", "run_id")
    is_named = experiences.c.task_id.is_not(None) if whole == "task" else names_a_run()
    others = [*eligible, not_(is_named)]
    runs = _turns(rows, "runs", in_task, task, eligible)
    turns = _turns(rows, "conversations", in_conversation, ("conversation_id",), others)
    is_alone = not_(in_task) & rows.c.conversation_id.is_(None)
    choices = _turns(rows, "choices", is_alone, ("msg_id",), [*others, experiences.c.conversation_id.is_(None)])
    of_wholes = [_by_runs(runs), turns, choices] if whole == "task" else [runs, turns]
    ranked = union_all(*of_wholes).subquery("turns")
    together = select(ranked.c.id, ranked.c.first_id).where(ranked.c.rank <= group_rows)
    if whole == "task":
        return together.cte("mates")
    return together.union_all(select(rows.c.id, rows.c.id.label("first_id")).where(is_alone)).cte("mates")


def _turns(
    rows: CTE, name: str, where: ColumnElement[bool], key: tuple[str, ...], eligible: list[ColumnElement[bool]]
) -> Select[Any]:
    """Select each eligible row that shares a key with `rows`, the first row with that key, and its rank there."""
    columns = [rows.c.key_group, *(rows.c[column] for column in key)]
    firsts = select(*columns, func.min(rows.c.id).label("first_id")).where(where).group_by(*columns).cte(name)
    same_group = experiences.c.key_group.is_not_distinct_from(firsts.c.key_group)
    together = and_(same_group, *(experiences.c[column] == firsts.c[column] for column in key))
    rank = func.row_number().over(partition_by=firsts.c.first_id, order_by=experiences.c.id).label("rank")
    return select(experiences.c.id, firsts.c.first_id, rank).join_from(firsts, experiences, together).where(*eligible)


def _by_runs(turns: Select[Any]) -> Select[Any]:
    """Select the rows of tasks with the rank of their run's last row, oldest run first: no limit of ranks cuts a run.

    Rows of a task's first run have their own ranks: a run that exceeds the limit alone is claimed in parts.
    """
    partition = [turns.selected_columns.first_id, run_of_task()]
    first, length = (function.over(partition_by=partition) for function in (func.min(experiences.c.id), func.count()))
    place = func.row_number().over(partition_by=partition, order_by=experiences.c.id)
    of_runs = turns.add_columns(first.label("first_of_run"), length.label("length"), place.label("place"))
    found = of_runs.subquery("of_runs")
    so_far = func.count().over(partition_by=found.c.first_id, order_by=found.c.first_of_run)  # including its own run
    rank = case((so_far == found.c.length, found.c.place), else_=so_far).label("rank")
    return select(found.c.id, found.c.first_id, rank)


def _whole_trajectories(mates: CTE, at_most: int, *where: ColumnElement[bool]) -> Select[Any]:
    """Select the ids of whole trajectories, oldest first, until `at_most` rows are reached."""
    so_far = func.count().over(order_by=mates.c.first_id)  # including all of its own trajectory
    own = func.count().over(partition_by=mates.c.first_id)
    ranked = select(mates.c.id, (so_far - own).label("before")).where(*where).subquery("ranked")
    return select(ranked.c.id).where(ranked.c.before < at_most).order_by(ranked.c.id)


def _claim_in_one_statement(batch: dict[str, Any], mates: CTE, at_least: int, at_most: int) -> Update:
    """Claim on PostgreSQL: skip trajectories with a row that another transaction has locked."""
    locked = (
        select(experiences.c.id)
        .where(experiences.c.id.in_(select(mates.c.id)), _IS_READY)
        .with_for_update(skip_locked=True)
    ).cte("locked")
    all_of_it = func.count(mates.c.id) == func.count(locked.c.id)
    whole = (
        select(mates.c.first_id)
        .outerjoin_from(mates, locked, locked.c.id == mates.c.id)
        .group_by(mates.c.first_id)
        .having(all_of_it)
    )
    picked = _whole_trajectories(mates, at_most, mates.c.first_id.in_(whole)).cte("picked")
    enough = select(func.count()).select_from(picked).scalar_subquery() >= at_least
    values = select(*(literal(value, batches.c[name].type).label(name) for name, value in batch.items())).where(enough)
    made = insert(batches).from_select(list(batch), values).returning(batches.c.id).cte("made")
    return (
        update(experiences)
        .where(experiences.c.id == picked.c.id, select(made.c.id).exists())
        .values(state=State.LEASED, batch_id=select(made.c.id).scalar_subquery(), acts=experiences.c.teaches)
        .returning(experiences.c.batch_id)
    )


def _first_of_each_key(at_most: int, eligible: list[ColumnElement[bool]]) -> Select[Any]:
    """Select ids of the oldest eligible rows of each key that set a reward."""
    rank = func.row_number().over(partition_by=experiences.c.feedback_key, order_by=experiences.c.id).label("rank")
    ranked = select(experiences.c.id, rank).where(experiences.c.state == State.READY, *eligible).cte("by_key")
    return select(ranked.c.id).where(ranked.c.rank <= at_most)


def discard_stale(connection: Connection, *, at_most_behind: int, after_id: int = 0) -> int:
    """READY → DISCARDED for rows sampled by a version that more than `at_most_behind` later ones have followed.

    Rows that were trained on something before become CONSUMED again instead. A demonstration that is still to be
    learned loses its reward only. A row that another transaction has locked is left for the next search. Returns the
    number of rows.
    """
    stale = (*is_ready(after_id), _is_stale(at_most_behind))
    reason = f"stale: more than {at_most_behind} versions behind (trainer.max_staleness_versions)"
    stays = and_(_IS_WRITTEN, _UNREWARDED != 0)
    ended = case((experiences.c.consumed_version.is_(None), State.DISCARDED), else_=State.CONSUMED)
    values = {
        "state": case((stays, State.READY), else_=ended),
        "teaches": case((stays, _UNREWARDED), else_=0),
        "reason": case((stays, experiences.c.reason), else_=reason),
    }
    found = select(experiences.c.id).where(*stale).order_by(experiences.c.id).with_for_update(skip_locked=True)
    discarded = update(experiences).where(experiences.c.id.in_(found), *stale)
    return connection.execute(discarded.values(values)).rowcount


def _is_stale(at_most_behind: int) -> ColumnElement[bool]:
    """Rows that a version too far behind sampled. A demonstration is learned as it was written, except its reward.

    Versions are counted, because numbers have gaps: a rollback rejects versions, and their numbers are not used again.
    """
    counted = versions.c.state.not_in((VersionState.RESERVED, VersionState.REJECTED))
    newest_first = select(versions.c.version).where(counted).order_by(versions.c.version.desc())
    oldest_allowed = newest_first.offset(at_most_behind).limit(1).scalar_subquery()
    as_written = and_(_IS_WRITTEN, _UNREWARDED != 0, experiences.c.teaches == _UNREWARDED)
    return and_(experiences.c.version < func.coalesce(oldest_allowed, 0), not_(as_written))
