"""Scores that a row refused, because it was leased or trained on, set its reward if it is to be trained on again.

The rows are locked: feedback that was being stored is then in the log before the log is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, select, update

from shared.config import RewardConfig
from shared.experience import State
from shared.ledger.conditions import are_about, in_parts
from shared.ledger.queries.signals import load_signals
from shared.ledger.tables import batches, experiences, signals
from shared.reward import EVERY_LESSON, SCORES, Lesson, credit_of, has_effect, reward_key

_OF_ROW = ("id", "msg_id", "choice", "reward", "turn_reward", "outcome", "teaches")
_MAY_ACT = (State.READY, State.LEASED)
_REWARD = int(Lesson.REWARD)
_OF_BATCH = select(batches.c.last_signal).where(batches.c.id == experiences.c.batch_id)
_SINCE_CLAIM = signals.c.id > _OF_BATCH.scalar_subquery()


def refused_by_lease(connection: Connection, *leased: ColumnElement[bool]) -> list[int]:
    """Return the ids of those of these leased rows that refused a score since their claim."""
    return _scored(connection, leased, experiences.c.acts.bitwise_and(_REWARD) != 0, _SINCE_CLAIM)


def scored_and_trained(connection: Connection, *trained: ColumnElement[bool]) -> list[int]:
    """Return the ids of those of these rows with a score that were trained on a reward."""
    return _scored(connection, trained, experiences.c.taught.bitwise_and(_REWARD) != 0)


def _scored(connection: Connection, rows: Sequence[ColumnElement[bool]], *where: ColumnElement[bool]) -> list[int]:
    of_scores = (signals.c.kind.in_(sorted(SCORES)), experiences.c.taught != int(EVERY_LESSON))  # not erased
    scored = select(experiences.c.id).join(signals, are_about()).where(*of_scores, *rows, *where)
    return list(connection.execute(scored.distinct().order_by(experiences.c.id)).scalars())


def credit_again(connection: Connection, ids: Sequence[int], rule: RewardConfig | None) -> None:
    """Set the rewards of rows that are to be trained on again from all their scores. rule: None: leave them.

    They are READY, or leased for other lessons than a reward.
    """
    if rule is None:
        return
    columns = [experiences.c[name] for name in _OF_ROW]
    for mine in in_parts(experiences.c.id, ids):
        rows = connection.execute(select(*columns).where(mine, experiences.c.state.in_(_MAY_ACT))).all()
        log = load_signals(connection, rows, SCORES)
        for row in rows:
            scores = [one for one in log[row.msg_id, row.choice] if has_effect(one, rule.metrics)]
            credit = credit_of(scores, rule, SCORES)
            rewards: dict[str, Any] = {name: getattr(credit, name) for name in ("reward", "turn_reward", "outcome")}
            if any(row._mapping[name] != value for name, value in rewards.items()):
                rewards |= {"teaches": row.teaches | credit.teaches, "feedback_key": reward_key(scores)}
                connection.execute(update(experiences).where(experiences.c.id == row.id).values(rewards))
