"""Scores that a row refused, because it was leased or trained on, set its reward if it is to be trained on again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, select, update

from shared.config import RewardConfig
from shared.experience import State
from shared.ledger.conditions import in_parts
from shared.ledger.connect import lock_rows
from shared.ledger.queries.signals import load_signals
from shared.ledger.tables import batches, experiences, signals
from shared.reward import SCORES, Lesson, credit_of, has_effect, reward_key

_OF_ROW = ("id", "msg_id", "choice", "reward", "turn_reward", "outcome", "teaches")
_REWARD = int(Lesson.REWARD)
_OF_BATCH = select(batches.c.last_signal).where(batches.c.id == experiences.c.batch_id)
_SINCE_CLAIM = signals.c.id > _OF_BATCH.scalar_subquery()


def refused_by_lease(connection: Connection, *leased: ColumnElement[bool]) -> list[int]:
    """Lock leased rows, and return the ids of those that refused a score since their claim."""
    return _scored(connection, leased, experiences.c.acts.bitwise_and(_REWARD) != 0, _SINCE_CLAIM)


def scored_and_trained(connection: Connection, *trained: ColumnElement[bool]) -> list[int]:
    """Lock rows, and return the ids of those with a score that were trained on a reward."""
    return _scored(connection, trained, experiences.c.taught.bitwise_and(_REWARD) != 0)


def _scored(connection: Connection, rows: Sequence[ColumnElement[bool]], *where: ColumnElement[bool]) -> list[int]:
    lock_rows(connection, experiences.c.id, *rows)  # feedback that is being stored is logged before the log is read
    about = and_(signals.c.msg_id == experiences.c.msg_id, signals.c.choice == experiences.c.choice)
    scored = select(experiences.c.id).join(signals, about).where(signals.c.kind.in_(sorted(SCORES)), *rows, *where)
    return list(connection.execute(scored.distinct().order_by(experiences.c.id)).scalars())


def credit_again(connection: Connection, ids: Sequence[int], rule: RewardConfig | None) -> None:
    """Set the rewards of rows that are READY again from all their scores. rule: None: leave them."""
    if rule is None:
        return
    columns = [experiences.c[name] for name in _OF_ROW]
    for mine in in_parts(experiences.c.id, ids):
        rows = connection.execute(select(*columns).where(mine, experiences.c.state == State.READY)).all()
        log = load_signals(connection, rows, SCORES)
        for row in rows:
            scores = [one for one in log[row.msg_id, row.choice] if has_effect(one, rule.metrics)]
            credit = credit_of(scores, rule, SCORES)
            rewards: dict[str, Any] = {name: getattr(credit, name) for name in ("reward", "turn_reward", "outcome")}
            if any(row._mapping[name] != value for name, value in rewards.items()):
                rewards |= {"teaches": row.teaches | credit.teaches, "feedback_key": reward_key(scores)}
                connection.execute(update(experiences).where(experiences.c.id == row.id).values(rewards))
