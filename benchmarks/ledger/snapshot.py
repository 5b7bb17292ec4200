"""Claims a second while a snapshot is held open on PostgreSQL.

Compared, alternating, with claims on a second database without one.
"""

from __future__ import annotations

import time

from sqlalchemy import text, update

from benchmarks.ledger.databases import SMALL, Databases, Figures, fill, make_sample
from shared.config import TrainerConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.stop_request import StopRequest
from trainer_service.claim import Claimer


class Learner:
    """A trainer that claims and publishes but does not train, on its own PostgreSQL database."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        fill(ledger, SMALL)
        self._config = TrainerConfig.model_validate({"batch_size": 64, "poll_interval_s": 0.01})
        self._claimer = Claimer(ledger, self._config, StopRequest())
        self._version = 0
        self.spent = 0.0  # seconds in claims, including loading their rows
        self.claims = 0

    def learn(self, batches: int = 20) -> None:
        """Claim rows that arrive as fast as they are claimed."""
        with self.ledger.write() as connection:
            transitions.record(connection, [make_sample(32, 16) for _ in range(64 * batches)])
            fresh = update(experiences).where(experiences.c.state == "RECORDED")
            connection.execute(fresh.values(state="READY", reward=1.0))
        for _ in range(batches):
            started = time.perf_counter()
            lease = self._claimer.next()
            self.spent += time.perf_counter() - started
            self.claims += 1
            assert lease is not None
            self._version += 1
            with self.ledger.write() as connection:
                transitions.publish(
                    connection,
                    version=self._version,
                    parent=None,
                    kind="full",
                    step=self._version,
                    trainer=self._config.name,
                    batch_ids=[lease.batch_id],
                )


def measure(databases: Databases, hold_s: float) -> Figures:
    """Claims a second on two databases, alternating. hold_s: how long a snapshot of the first is open, at least."""
    held, free = (Learner(databases.open("postgresql")) for _ in range(2))

    def claims_per_s(seconds: float) -> list[float]:
        for learner in (held, free):
            learner.spent, learner.claims = 0.0, 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            held.learn()
            free.learn()
        return [learner.claims / learner.spent for learner in (held, free)]

    before = claims_per_s(min(30.0, hold_s))
    with held.ledger._engine.connect() as report:
        report.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        report.execute(text("SELECT count(*) FROM experiences"))
        began = time.perf_counter()
        parts = [claims_per_s(hold_s / 6) for _ in range(6)]
        held_s = time.perf_counter() - began
    held.ledger.close()
    free.ledger.close()
    return {
        "held_s": held_s,
        "claims_per_s_before": before[0],
        "claims_per_s_first_sixth": parts[0][0],
        "claims_per_s_last_sixth": parts[-1][0],
        "claims_per_s_before_free": before[1],
        "claims_per_s_last_sixth_free": parts[-1][1],
        "rate_kept": parts[-1][0] / parts[-1][1],
        "rate_kept_of_before": parts[-1][0] / before[0],
    }
