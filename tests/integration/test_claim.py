"""Claim on both databases: oldest first, whole batches, never one row twice, nothing stale."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import event, select, text

from shared.config import TrainerConfig
from shared.experience import Experience, Sampling, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Pace, count_by_state, pace
from shared.ledger.tables import experiences
from shared.lifecycle import StopRequest
from tests.experiences import record_ready
from trainer_service.claim import Claimer


@pytest.fixture
def ledger(tmp_path, database_url):
    url = (database_url or f"sqlite:///{tmp_path / 'ledger.sqlite3'}").replace("postgresql://", "postgresql+psycopg://")
    opened = Ledger.open(url)
    yield opened
    opened.close()


def rows(count: int, version: int = 0, name: str = "m") -> list[Experience]:
    tokens = Tokens(np.array([1], np.int32), np.array([2], np.int32), np.array([-0.5], np.float32))
    return [
        Experience(0, f"{name}{n}", 0, None, None, None, f"{name}{n}", version, 1.0, 0.0, tokens, Sampling())
        for n in range(count)
    ]


def claimer(ledger: Ledger, **config) -> Claimer:
    return Claimer(ledger, TrainerConfig.model_validate({"poll_interval_s": 0.02, **config}), StopRequest())


def names(lease) -> list[str]:
    return [row.msg_id for row in lease.rows]


def test_the_oldest_rows_come_first(ledger):
    record_ready(ledger, rows(5))
    assert names(claimer(ledger, batch_size=2).next()) == ["m0", "m1"]
    assert names(claimer(ledger, batch_size=2).next()) == ["m2", "m3"]


def test_a_smaller_batch_is_taken_only_after_its_time(ledger):
    record_ready(ledger, rows(3))
    stop = StopRequest()
    patient = Claimer(ledger, TrainerConfig(batch_size=4, poll_interval_s=0.02), stop)
    threading.Timer(0.3, stop.set).start()
    assert patient.next() is None
    assert len(claimer(ledger, batch_size=4, batch_timeout_s=0.1).next().rows) == 3


def turns(conversation: str, count: int) -> list[Experience]:
    """A conversation's rows."""
    return [replace(row, conversation_id=conversation) for row in rows(count, name=f"{conversation}-")]


def test_a_trajectory_is_claimed_whole_even_when_the_batch_grows_over_it(ledger):
    record_ready(ledger, [*turns("a", 2), *turns("b", 3), *rows(3)])
    record_ready(ledger, [replace(row, msg_id="a-late") for row in turns("a", 1)])
    assert names(claimer(ledger, batch_size=4).next()) == ["a-0", "a-1", "b-0", "b-1", "b-2", "a-late"]
    assert names(claimer(ledger, batch_size=3).next()) == ["m0", "m1", "m2"]


def test_a_trajectory_that_another_trainer_looks_at_is_never_split(postgres):
    """PostgreSQL: one locked row keeps its whole trajectory out, and no other."""
    ledger = Ledger.open(postgres.new_database().replace("postgresql://", "postgresql+psycopg://"))
    record_ready(ledger, [*turns("a", 3), *rows(2)])
    with ledger.write() as other:
        other.execute(select(experiences.c.id).where(experiences.c.msg_id == "a-1").with_for_update())
        with ledger.write() as connection:
            assert transitions.claim(connection, owner="t", at_least=1, at_most=2, lease_s=60) is None
            batch = transitions.claim(connection, owner="t", at_least=1, at_most=4, lease_s=60)
            assert names(transitions.load_lease(connection, batch)) == ["m0", "m1"]
    assert names(claimer(ledger, batch_size=3).next()) == ["a-0", "a-1", "a-2"]
    ledger.close()


def test_rows_in_hand_are_never_looked_up_by_the_index_of_a_state(postgres):
    """That holds, while someone's snapshot is open, all rows that were ever in it: 180 s of it cost claims 0.7 of their
    rate, once an ANALYZE had made the planner prefer it (benchmarks/ledger, snapshot)."""
    ledger = Ledger.open(postgres.new_database().replace("postgresql://", "postgresql+psycopg://"))
    record_ready(ledger, [*turns("a", 3), *rows(5)])
    statements: list[tuple[str, object]] = []

    def keep(_connection, _cursor, statement, parameters, _context, _many) -> None:
        if statement.startswith(("SELECT", "UPDATE", "WITH")):
            statements.append((statement, parameters))

    event.listen(ledger._engine, "after_cursor_execute", keep)
    lease = claimer(ledger, batch_size=8).next()
    with ledger.write() as connection:
        transitions.publish(
            connection, version=1, parent=None, kind="full", step=1, trainer="trainer", batch_ids=[lease.batch_id]
        )
    event.remove(ledger._engine, "after_cursor_execute", keep)
    plans = []
    with ledger.write() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        for statement, parameters in statements:
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
            if statement.startswith("WITH oldest"):
                assert plan.count("ix_experiences_ready") == 1, plan  # where it looks for the oldest
            plans.append(plan)
    ledger.close()
    assert len([plan for plan in plans if "ix_experiences_batch" in plan]) == 2, plans  # loaded, published
    assert not any("ix_experiences_leased" in plan for plan in plans), plans


def test_two_trainers_never_hold_the_same_row(ledger):
    record_ready(ledger, rows(120))
    taken: list[str] = []

    def trainer(name: str) -> None:
        mine = claimer(ledger, name=name, batch_size=4)
        for _ in range(15):
            taken.extend(names(mine.next()))

    threads = [threading.Thread(target=trainer, args=(f"t{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(taken) == sorted(row.msg_id for row in rows(120))


def test_the_pace_tells_how_rows_flow_and_what_waits(ledger):
    now = time.time()
    record_ready(ledger, [replace(row, created_at=now - 30) for row in rows(6)])
    record_ready(ledger, [replace(row, created_at=now - 300, msg_id=f"old{row.msg_id}") for row in rows(2)])
    lease = claimer(ledger, batch_size=4).next()
    with ledger.write() as connection:
        about = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[lease.batch_id])
    with ledger.read() as connection:
        assert pace(connection, now) == Pace(pytest.approx(30, abs=1), 6.0, 4.0)


def test_a_lease_that_ran_out_goes_back_and_its_late_owner_cannot_publish(ledger):
    record_ready(ledger, rows(2))
    lost = claimer(ledger, name="slow", batch_size=2, lease_s=0.01).next()
    threading.Event().wait(0.05)
    assert names(claimer(ledger, name="quick", batch_size=2).next()) == ["m0", "m1"]
    with pytest.raises(transitions.LeaseLost), ledger.write() as connection:
        late = {"trainer": "slow", "batch_ids": [lost.batch_id], "state_path": "x"}
        transitions.publish(connection, version=1, parent=0, kind="full", step=1, **late)


def test_rows_of_versions_far_behind_are_discarded_and_not_trained_on(ledger):
    with ledger.write() as connection:
        for version in range(8):
            parent = version - 1 if version else None
            transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
    record_ready(ledger, rows(4, version=1, name="old") + rows(4, version=4, name="new"))
    lease = claimer(ledger, batch_size=4, max_staleness_versions=3).next()
    assert names(lease) == ["new0", "new1", "new2", "new3"]
    with ledger.read() as connection:
        assert count_by_state(connection)["DISCARDED"] == 4


def test_one_key_fills_only_its_share_of_a_batch(ledger):
    record_ready(ledger, rows(10, name="angry"), key_name="angry")
    assert claim_names(ledger, at_least=8, share=0.5) is None
    record_ready(ledger, rows(10, name="calm"), key_name="calm")
    taken = claim_names(ledger, at_least=8, share=0.5)
    assert taken == [*(f"angry{n}" for n in range(4)), *(f"calm{n}" for n in range(4))]


def claim_names(ledger: Ledger, *, at_least: int, share: float) -> list[str] | None:
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=at_least, at_most=8, lease_s=60, share_per_key=share)
        return None if batch is None else names(transitions.load_lease(connection, batch))
