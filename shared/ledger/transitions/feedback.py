"""3, feedback: signals are appended to the log, and the reward is what the rule makes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, select, true, update

from shared.config import RewardConfig
from shared.experience import State
from shared.ledger.queries import MAX_PARAMETERS
from shared.ledger.tables import experiences, idempotency, signals
from shared.ledger.transitions.rows import AnyRow, choice_name, in_scope, is_message
from shared.reward import Signal, reward_of

ReceiptState = Literal["applied", "updated", "duplicate", "unknown", "already_trained", "expired"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of feedback for one target, as the caller named it."""

    msg_id: str
    state: ReceiptState


def apply_feedback(
    connection: Connection,
    *,
    msg_ids: Sequence[str],
    task_id: str | None,
    run_id: str | None,
    said: Sequence[Signal],
    rule: RewardConfig,
    key_name: str | None = None,
    key_group: str | None = None,
    conversations: bool = False,
) -> list[Receipt]:
    """Append signals to the log of every target and set the reward, by `rule`, of those that are not leased yet.

    Targets: each of `msg_ids` ("ID" is all choices of a message, "ID#2" one), or else the rows of task and run. With
    both, rows whose chat named no task or run take these: runners that chat unmarked name them here.
    key_group: reach only rows of this group; None: all rows.
    conversations: reach every turn of the conversations that the targets belong to.
    Returns one receipt for each id named, and for each message found by task, run or conversation; an id nobody knows
    is `unknown`.
    """
    mine = true() if key_group is None else experiences.c.key_group == key_group
    found: dict[str, list[AnyRow]] = {}
    if msg_ids:
        found = {name: _rows_of(connection, and_(is_message(name), mine)) for name in dict.fromkeys(msg_ids)}
        _attribute(connection, [row for rows in found.values() for row in rows], task_id, run_id)
    else:
        for row in _rows_of(connection, and_(in_scope(task_id, run_id), mine)):
            found.setdefault(row.msg_id, []).append(row)
    if conversations:
        reached = {row.id for rows in found.values() for row in rows}
        names = {row.conversation_id for rows in found.values() for row in rows if row.conversation_id is not None}
        for row in _rows_of(connection, and_(experiences.c.conversation_id.in_(names), mine)):
            if row.id not in reached:
                found.setdefault(choice_name(row.msg_id, row.choice), []).append(row)
    now = time.time()
    return [
        Receipt(name, _apply(connection, rows, said, rule, key_name, now) if rows else "unknown")
        for name, rows in found.items()
    ]


def _rows_of(connection: Connection, where: ColumnElement[bool]) -> list[AnyRow]:
    columns = (
        experiences.c.id,
        experiences.c.msg_id,
        experiences.c.choice,
        experiences.c.conversation_id,
        experiences.c.task_id,
        experiences.c.run_id,
        experiences.c.state,
        experiences.c.reward,
    )
    query = select(*columns).where(where).order_by(experiences.c.id)
    if connection.dialect.name == "postgresql":
        query = query.with_for_update()  # SQLite's BEGIN IMMEDIATE has locked all already
    return list(connection.execute(query))


def _attribute(connection: Connection, rows: Sequence[AnyRow], task_id: str | None, run_id: str | None) -> None:
    for column, value in ((experiences.c.task_id, task_id), (experiences.c.run_id, run_id)):
        ids = [row.id for row in rows if value is not None and row._mapping[column.name] is None]
        for start in range(0, len(ids), MAX_PARAMETERS):
            mine = experiences.c.id.in_(ids[start : start + MAX_PARAMETERS])
            connection.execute(update(experiences).where(mine, column.is_(None)).values({column: value}))


def _apply(
    connection: Connection,
    rows: list[AnyRow],
    said: Sequence[Signal],
    rule: RewardConfig,
    key_name: str | None,
    now: float,
) -> ReceiptState:
    open_rows = [row for row in rows if row.state in (State.RECORDED, State.READY)]
    log = _signals_of(connection, rows)
    if open_rows and all(_says_again(log[row.msg_id, row.choice], said) for row in rows):
        return "duplicate"
    connection.execute(
        insert(signals),
        [
            {
                "msg_id": row.msg_id,
                "choice": row.choice,
                "kind": signal.kind,
                "name": signal.name,
                "value": signal.value,
                "text": signal.text,
                "key_name": key_name,
                "created_at": now,
            }
            for row in rows
            for signal in said
        ],
    )
    if not open_rows:
        return "expired" if all(row.state == State.DISCARDED for row in rows) else "already_trained"
    changed: dict[float | None, list[int]] = {}
    for row in open_rows:
        reward = reward_of([*log[row.msg_id, row.choice], *said], rule)
        if reward != row.reward:
            changed.setdefault(reward, []).append(row.id)
    for reward, ids in changed.items():
        _set_reward(connection, ids, reward, feedback_key=key_name)
    return "updated" if changed and any(row.reward is not None for row in open_rows) else "applied"


def _says_again(log: list[Signal], said: Sequence[Signal]) -> bool:
    """Whether everything said now is the last that was said of its kind."""
    last = {(signal.kind, signal.name): signal for signal in log}
    return all(last.get((signal.kind, signal.name)) == signal for signal in said)


def _signals_of(connection: Connection, rows: Sequence[AnyRow]) -> dict[tuple[str, int], list[Signal]]:
    """The log of each row, oldest first."""
    log: dict[tuple[str, int], list[Signal]] = {(row.msg_id, row.choice): [] for row in rows}
    names = sorted({msg_id for msg_id, _ in log})
    for start in range(0, len(names), MAX_PARAMETERS):
        mine = signals.c.msg_id.in_(names[start : start + MAX_PARAMETERS])
        for row in connection.execute(select(signals).where(mine).order_by(signals.c.id)):
            if (row.msg_id, row.choice) in log:
                log[row.msg_id, row.choice].append(Signal(row.kind, row.value, row.name, row.text))
    return log


def _set_reward(connection: Connection, ids: Sequence[int], reward: float | None, **more: str | None) -> None:
    for start in range(0, len(ids), MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + MAX_PARAMETERS])
        still_open = experiences.c.state.in_((State.RECORDED, State.READY))
        connection.execute(update(experiences).where(mine, still_open).values(reward=reward, **more))


def recompute_rewards(connection: Connection, rule: RewardConfig, after_id: int = 0) -> tuple[int, int | None]:
    """Apply the rule to some of the rows that are not leased yet and of which something was said.

    after_id: where the last call ended. Returns (rows changed, where the next call begins; None at the end).
    """
    about = select(signals.c.id).where(
        signals.c.msg_id == experiences.c.msg_id, signals.c.choice == experiences.c.choice
    )
    columns = (experiences.c.id, experiences.c.msg_id, experiences.c.choice, experiences.c.reward)
    mine = (experiences.c.id > after_id, experiences.c.state.in_((State.RECORDED, State.READY)), about.exists())
    query = select(*columns).where(*mine).order_by(experiences.c.id).limit(MAX_PARAMETERS)
    rows = list(connection.execute(query))
    log = _signals_of(connection, rows)
    changed = 0
    for row in rows:
        reward = reward_of(log[row.msg_id, row.choice], rule)
        if reward != row.reward:
            _set_reward(connection, [row.id], reward)
            changed += 1
    return changed, rows[-1].id if rows else None


def remember_answer(connection: Connection, key: str, response: bytes) -> None:
    """Keep the answer to an idempotency key, in the same transaction as what it reports."""
    connection.execute(insert(idempotency).values(key=key, response=response, created_at=time.time()))


def remembered_answer(connection: Connection, key: str) -> bytes | None:
    """The answer first given to this idempotency key."""
    return connection.execute(select(idempotency.c.response).where(idempotency.c.key == key)).scalar()


def forget_answers(connection: Connection, *, before: float) -> None:
    """Drop idempotency keys from before this moment, Unix seconds."""
    connection.execute(delete(idempotency).where(idempotency.c.created_at < before))
