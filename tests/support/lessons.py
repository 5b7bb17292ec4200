"""Callers' feedback and a trainer's steps, as transactions on a ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import select

from shared.config import RewardConfig
from shared.experience import Lease, Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.reward import SCORES, Signal
from tests.support.samples import sample

LEARNED = SCORES | {"comment", "correction"}
UP, COMMENT = Signal("rating", text="up"), Signal("comment", text="too long")
RUN = {"task_id": "t", "run_id": "1"}


def record(ledger: Ledger, *names: str, prompt: str | None = None, **about: Any) -> None:
    """prompt: of all of them; None: each has its own."""
    with ledger.write() as connection:
        for name in names:
            ids = np.frombuffer((prompt or name).encode(), np.uint8).astype(np.int32)
            tokens = Tokens(ids, np.array([3], np.int32), np.array([-0.5], np.float32))
            transitions.record(connection, [sample(name, **{"tokens": tokens, **about})])


def say(ledger: Ledger, name: str, *signals: Signal, **about: Any) -> str:
    """Send feedback. Returns the receipt's state."""
    asked = {"msg_ids": [name], "task_id": None, "run_id": None, **about}
    with ledger.write() as connection:
        said = {"signals": signals, "rule": RewardConfig(), "learned": LEARNED}
        return transitions.apply_feedback(connection, **asked, **said)[0].state


def commit(ledger: Ledger) -> int:
    with ledger.write() as connection:
        return transitions.commit(connection)[0]


def claim(ledger: Ledger, at_most: int = 9) -> Lease | None:
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=at_most, lease_s=60)
        return None if batch is None else queries.load_lease(connection, batch, kinds=LEARNED)


def publish(ledger: Ledger, lease: Lease, version: int) -> None:
    about: dict[str, Any] = {"version": version, "parent": None, "kind": "full", "step": version, "trainer": "t"}
    with ledger.write() as connection:
        transitions.publish(connection, **about, batch_ids=[lease.batch_id])


def train(ledger: Ledger, version: int) -> dict[str, tuple[int, float | None, list[str]]]:
    """Commit, claim and publish. Returns for each row what acts, its own reward, and its kinds of signals."""
    commit(ledger)
    lease = claim(ledger)
    if lease is None:
        return {}
    publish(ledger, lease, version)
    return {row.msg_id: (row.acts, row.own_reward, [signal.kind for signal in row.signals]) for row in lease.rows}


def stands(ledger: Ledger, *columns: str) -> list[Any]:
    query = select(*(experiences.c[name] for name in columns)).order_by(experiences.c.id)
    with ledger.read() as connection:
        return [tuple(row) for row in connection.execute(query)]
