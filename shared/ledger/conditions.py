"""Conditions that queries and transitions use to find rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    FromClause,
    Row,
    String,
    and_,
    case,
    func,
    literal_column,
    not_,
    or_,
    select,
    true,
)

from shared.experience import State, TrajectoryKey
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import Lesson

AnyRow = Row[*tuple[Any, ...]]
UNGROUPED = ""  # in place of a group's name
MAX_ID_BYTES = 1200  # of a task's or run's name in UTF-8: PostgreSQL's index of both takes 2704 bytes
MAX_PARAMETERS = 1000  # maximum number of values in one IN list
_TRAJECTORIES = 100  # maximum number in one condition


def in_parts(column: Column[Any], values: Sequence[Any]) -> Iterator[ColumnElement[bool]]:
    """Yield conditions that together mean `column IN values`, each with at most MAX_PARAMETERS values."""
    for start in range(0, len(values), MAX_PARAMETERS):
        yield column.in_(values[start : start + MAX_PARAMETERS])


def split_name(name: str) -> tuple[str, int | None]:
    """Split a caller's name into message and choice: ID is all choices of a message (None); ID#CHOICE is one.

    A number with leading zeros is part of the message's id, so that a choice has one name with its number.
    """
    msg_id, mark, index = name.rpartition("#")
    if mark and index.isascii() and index.isdigit() and len(index) < 10 and index == str(int(index)):
        return msg_id, int(index)
    return name, None


def in_scope(task_id: str | None, run_id: str | None) -> ColumnElement[bool]:
    """Rows of a task and a run; None: of all tasks or runs."""
    asked = {experiences.c.task_id: task_id, experiences.c.run_id: run_id}
    return and_(true(), *(column == name for column, name in asked.items() if name is not None))


def in_group(key_group: str | None, rows: FromClause = experiences) -> ColumnElement[bool]:
    """Rows that a key reaches: those of its group; UNGROUPED: those of keys without a group; None: all."""
    if key_group is None:
        return true()
    return rows.c.key_group.is_(None) if key_group == UNGROUPED else rows.c.key_group == key_group


def are_about(rows: FromClause = experiences) -> ColumnElement[bool]:
    """Signals about these rows."""
    return and_(signals.c.msg_id == rows.c.msg_id, signals.c.choice == rows.c.choice)


def names_a_run(rows: FromClause = experiences) -> ColumnElement[bool]:
    """Rows whose trajectory is a run: `shared.experience.trajectory_key` in SQL."""
    return and_(rows.c.task_id.is_not(None), rows.c.run_id.is_not(None))


def run_of_task(rows: FromClause = experiences) -> ColumnElement[str]:
    """The run of its task that a row belongs to. Without a name, it is the row's conversation, or the row alone."""
    return func.coalesce(rows.c.run_id, rows.c.conversation_id, rows.c.id.cast(String))


def in_trajectories(keys: Collection[TrajectoryKey]) -> Iterator[ColumnElement[bool]]:
    """Yield conditions that together find the rows of these trajectories; none for a row without a trajectory."""
    known = [key for key in keys if len(key) > 1 or isinstance(key[0], str)]
    for start in range(0, len(known), _TRAJECTORIES):
        yield or_(*_of_trajectories(known[start : start + _TRAJECTORIES]))


def _of_trajectories(keys: Sequence[TrajectoryKey]) -> Iterator[ColumnElement[bool]]:
    """Yield one condition for all conversations, and one for all runs of a task within a group."""
    if conversations := [key[0] for key in keys if len(key) == 1]:
        yield and_(experiences.c.conversation_id.in_(conversations), not_(names_a_run()))
    runs: dict[tuple[str | int | None, ...], list[str | int | None]] = defaultdict(list)
    for key in keys:
        if len(key) > 1:
            runs[key[:-1]].append(key[-1])
    for (group, task_id), names in runs.items():
        of_task = and_(experiences.c.task_id == task_id, experiences.c.run_id.in_(names))
        yield and_(of_task, in_group(UNGROUPED if group is None else str(group)))


def is_in(state: Column[str], name: str) -> ColumnElement[bool]:
    """Whether a row is in a state; for rows that are found by id, batch or conversation.

    The coalesce() excludes PostgreSQL's partial index on that state: while a snapshot is open, that index contains
    every row that has been in the state since. The values are part of the statement, so that the index on READY rows of
    a task, which has the same condition, is used.
    """
    return func.coalesce(state, literal_column("''")) == literal_column(f"'{name}'")


def is_ready(after_id: int = 0) -> list[ColumnElement[bool]]:
    """Rows that wait for a trainer, recorded after this row."""
    ready: list[ColumnElement[bool]] = [experiences.c.state == State.READY]
    return [*ready, experiences.c.id > after_id] if after_id else ready


def is_done(before: float | None = None) -> list[ColumnElement[bool]]:
    """Rows that are discarded, or trained on with all their signals, recorded before this time (Unix seconds).

    Without erased rows, of which only the lineage is left.
    """
    trained = and_(experiences.c.state == State.CONSUMED, experiences.c.teaches == 0)
    tokens = select(payloads.c.experience_id).where(payloads.c.experience_id == experiences.c.id)
    done = or_(experiences.c.state == State.DISCARDED, trained) & tokens.correlate(experiences).exists()
    return [done] if before is None else [done, experiences.c.created_at < before]


def need_not_wait(runs_of_task: int, quiet_since: float | None) -> list[ColumnElement[bool]]:
    """READY rows that need not wait for rewards of other runs of their task.

    These are rows without a task; rows of a task with at least `runs_of_task` READY runs that have a reward, or with no
    signal since `quiet_since` (Unix seconds; None: they wait without limit); rows of a run without a reward, whose
    other signals need no other run; and rows of updates that failed twice, which have to be tried alone.
    """
    if runs_of_task <= 1:
        return []
    mates = experiences.alias("runs_of_task")
    run, own_run = run_of_task(mates), run_of_task()
    rewarded = mates.c.teaches.bitwise_and(int(Lesson.REWARD)) != 0
    enough: list[ColumnElement[bool]] = [func.count(case((rewarded, run)).distinct()) >= runs_of_task]
    if quiet_since is not None:
        enough.append(func.coalesce(func.max(signals.c.created_at), 0.0) <= quiet_since)
    ready_of_task = (
        is_in(mates.c.state, State.READY),
        mates.c.task_id == experiences.c.task_id,
        mates.c.key_group.is_not_distinct_from(experiences.c.key_group),
    )
    with_signals = select(mates.c.task_id).join_from(mates, signals, are_about(mates), isouter=True)
    complete = with_signals.where(*ready_of_task).group_by(mates.c.task_id).having(or_(*enough))
    own_reward = select(mates.c.id).where(*ready_of_task, rewarded, run == own_run)
    has_failed = experiences.c.failures >= 2
    return [or_(experiences.c.task_id.is_(None), has_failed, complete.exists(), not_(own_reward.exists()))]
