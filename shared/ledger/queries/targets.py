"""Finds the rows that feedback targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, select

from shared.errors import TooManyTargets
from shared.experience import TrajectoryKey, choice_name, trajectory_key
from shared.ledger.conditions import AnyRow, in_group, in_parts, in_scope, split_name
from shared.ledger.connect import plan_by_values
from shared.ledger.tables import experiences
from shared.reward import Scope

_MANY = 50  # number of values from which statements are planned anew


class Target(NamedTuple):
    """A row that feedback reaches."""

    id: int
    scope: Scope  # what the feedback is about for this row


Targets = dict[str, list[Target]]  # name in a receipt → its rows; none for an unknown name
_COLUMNS = ("id", "msg_id", "choice", "task_id", "run_id", "key_group", "conversation_id")


def find_targets(
    connection: Connection,
    *,
    msg_ids: Sequence[str],
    task_id: str | None,
    run_id: str | None,
    key_group: str | None = None,
    conversations: bool = False,
    scope: Scope | None = None,
    at_most: int | None = None,
) -> Targets:
    """Return the rows of each of `msg_ids` ("ID" is all choices of a message, "ID#2" one), or else of the task and run.

    key_group: only rows that in_group() finds for it. conversations: add every turn of the conversations of these rows.
    scope: what the feedback is about, for any targets. Raises TooManyTargets for more than `at_most` rows.
    """
    limit = None if at_most is None else at_most + 1
    mine = in_group(key_group)
    found: dict[str, list[AnyRow]] = {}
    if len(msg_ids) > _MANY or conversations:
        plan_by_values(connection)
    if msg_ids:
        found = _by_name(connection, msg_ids, mine)
    else:
        for row in _rows(connection, [in_scope(task_id, run_id)], mine, limit):
            found.setdefault(row.msg_id, []).append(row)
    if conversations:
        _add_other_turns(connection, found, mine, limit)
    if at_most is not None and sum(map(len, found.values())) > at_most:
        raise TooManyTargets(f"this is about more than {at_most} rows; name a run, or fewer messages")
    if scope is None and msg_ids and not conversations:
        scopes = _scopes_of_named(found, task_id, run_id)
    else:
        whole: Scope = scope or ("conversation" if conversations else "run")
        scopes = {row.id: whole for rows in found.values() for row in rows}
    return {name: [Target(row.id, scopes.get(row.id, "message")) for row in rows] for name, rows in found.items()}


def _scopes_of_named(found: dict[str, list[AnyRow]], task_id: str | None, run_id: str | None) -> dict[int, Scope]:
    """Return the rows whose trajectory contains several of the named messages: the feedback is about these as a whole.

    task_id and run_id: used for rows whose chat named none.
    """
    rows = {row.id: row for rows in found.values() for row in rows}
    keys: dict[int, TrajectoryKey] = {}
    messages: dict[TrajectoryKey, set[str]] = defaultdict(set)
    for row in rows.values():
        keys[row.id] = trajectory_key(row, task_id, run_id)
        messages[keys[row.id]].add(row.msg_id)
    return {row_id: "messages" for row_id, key in keys.items() if len(messages[key]) > 1}


def _rows(
    connection: Connection, parts: Iterable[ColumnElement[bool]], mine: ColumnElement[bool], limit: int | None = None
) -> Iterable[AnyRow]:
    columns = (experiences.c[name] for name in _COLUMNS)
    query = select(*columns).order_by(experiences.c.id).limit(limit)
    for part in parts:
        yield from connection.execute(query.where(part, mine))


def _by_name(connection: Connection, names: Sequence[str], mine: ColumnElement[bool]) -> dict[str, list[AnyRow]]:
    asked = {name: split_name(name) for name in names}
    of_message: dict[str, list[AnyRow]] = {msg_id: [] for msg_id, _ in asked.values()}
    for row in _rows(connection, in_parts(experiences.c.msg_id, list(of_message)), mine):
        of_message[row.msg_id].append(row)
    return {
        name: [row for row in of_message[msg_id] if choice is None or row.choice == choice]
        for name, (msg_id, choice) in asked.items()
    }


def _add_other_turns(
    connection: Connection, found: dict[str, list[AnyRow]], mine: ColumnElement[bool], limit: int | None
) -> None:
    rows = [row for rows in found.values() for row in rows]
    reached = {row.id for row in rows}
    names = list(dict.fromkeys(row.conversation_id for row in rows if row.conversation_id is not None))
    for row in _rows(connection, in_parts(experiences.c.conversation_id, names), mine, limit):
        if row.id not in reached:
            found.setdefault(choice_name(row.msg_id, row.choice), []).append(row)
