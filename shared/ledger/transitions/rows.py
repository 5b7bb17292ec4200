"""What the transitions share: how rows are named, found and counted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Row, and_, func, select

from shared.experience import State
from shared.ledger.tables import experiences

AnyRow = Row[*tuple[Any, ...]]


def choice_name(msg_id: str, choice: int) -> str:
    """How one choice is named: ID for the first, ID#CHOICE for another."""
    return f"{msg_id}#{choice}" if choice else msg_id


def is_message(name: str) -> ColumnElement[bool]:
    """The rows that a caller means by this: all choices of ID, or the one of ID#CHOICE."""
    msg_id, mark, index = name.rpartition("#")
    if mark and index.isascii() and index.isdigit() and len(index) < 10:
        return and_(experiences.c.msg_id == msg_id, experiences.c.choice == int(index))
    return experiences.c.msg_id == name


def in_scope(task_id: str | None, run_id: str | None) -> ColumnElement[bool]:
    """The rows of a task and a run; all of them where one is not named."""
    conditions: list[ColumnElement[bool]] = [experiences.c.id.is_not(None)]
    if task_id is not None:
        conditions.append(experiences.c.task_id == task_id)
    if run_id is not None:
        conditions.append(experiences.c.run_id == run_id)
    return and_(*conditions)


def is_in(state: Column[str], name: str) -> ColumnElement[bool]:
    """Whether a row is in a state; of rows that are looked up by their id, batch or conversation.

    Said so that no index of rows in that state serves it: while someone's snapshot is open on PostgreSQL, such an index
    holds every row that was ever in it since.
    """
    return func.coalesce(state, "") == name


def count_ready(connection: Connection, *, at_most: int | None = None, after_id: int = 0) -> int:
    """How many rows wait for a trainer; counted up to `at_most`, from `after_id` on."""
    ready = select(experiences.c.id).where(*ready_after(after_id)).limit(at_most).subquery()
    return int(connection.execute(select(func.count()).select_from(ready)).scalar_one())


def oldest_ready(connection: Connection) -> int | None:
    """The id of the oldest row that waits for a trainer."""
    oldest: int | None = connection.execute(select(func.min(experiences.c.id)).where(*ready_after(0))).scalar()
    return oldest


def ready_after(after_id: int) -> list[ColumnElement[bool]]:
    """Rows that wait for a trainer, recorded after this one."""
    ready: list[ColumnElement[bool]] = [experiences.c.state == State.READY]
    return [*ready, experiences.c.id > after_id] if after_id else ready
