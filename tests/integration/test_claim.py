"""Claim on both databases: oldest first, whole batches, never one row twice, nothing stale."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import event, select, text, update
from sqlalchemy.exc import IntegrityError

from shared.config import TrainerConfig
from shared.errors import LeaseLost
from shared.experience import Experience, Tokens
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import Pace, count_by_state, pace, quarantined
from shared.ledger.queries.lease import DEATHS_TOLERATED
from shared.ledger.tables import experiences
from shared.stop_request import StopRequest
from tests.support.experiences import record_ready, rows, samples_of
from tests.support.polls import SecondAtEachPoll, StopAfterPolls
from trainer_service.claim import Claimer


def claimer(ledger: Ledger, **config) -> Claimer:
    return Claimer(ledger, TrainerConfig.model_validate({"poll_interval_s": 0.02, **config}), StopRequest())


def names(lease) -> list[str]:
    return [row.msg_id for row in lease.rows]


def test_the_oldest_rows_come_first(ledger):
    record_ready(ledger, rows(5))
    assert names(claimer(ledger, batch_size=2).next()) == ["m0", "m1"]
    assert names(claimer(ledger, batch_size=2).next()) == ["m2", "m3"]


def test_a_smaller_batch_is_taken_only_after_its_time(ledger, monkeypatch):
    record_ready(ledger, rows(3))
    patient = Claimer(ledger, TrainerConfig(batch_size=4, poll_interval_s=0.02), StopAfterPolls(10))
    assert patient.next() is None
    clock = SecondAtEachPoll()
    monkeypatch.setattr("trainer_service.claim.time", clock)
    assert len(Claimer(ledger, TrainerConfig(batch_size=4, batch_timeout_s=10), clock).next().rows) == 3
    assert clock.now_s == 10


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
            assert names(queries.load_lease(connection, batch)) == ["m0", "m1"]
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
    assert len([plan for plan in plans if "ix_experiences_batch" in plan]) == 5, (
        plans
    )  # its lessons chosen, loaded, locked, what was said since found, published
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
        thread.join(120)
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
    with pytest.raises(LeaseLost), ledger.write() as connection:
        late = {"trainer": "slow", "batch_ids": [lost.batch_id], "state_path": "x"}
        transitions.publish(connection, version=1, parent=0, kind="full", step=1, **late)


def test_a_publish_whose_answer_was_lost_can_be_repeated_and_only_that(ledger):
    record_ready(ledger, rows(2))
    lease = claimer(ledger, batch_size=2).next()
    mine = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer", "state_path": "x"}
    for _ in range(2):
        with ledger.write() as connection:
            transitions.publish(connection, **mine, batch_ids=[lease.batch_id])
    for other in ({"trainer": "another"}, {"state_path": "y"}):
        with pytest.raises(IntegrityError), ledger.write() as connection:
            transitions.publish(connection, **{**mine, **other}, batch_ids=[])
    with ledger.read() as connection:
        assert count_by_state(connection)["CONSUMED"] == 2


def publish_versions(ledger: Ledger, count: int) -> None:
    with ledger.write() as connection:
        for version in range(count):
            transitions.publish(connection, version=version, parent=None, kind="full", step=version)


def test_rows_of_versions_far_behind_are_discarded_and_not_trained_on(ledger):
    publish_versions(ledger, 8)
    record_ready(ledger, rows(4, version=1, name="old") + rows(4, version=4, name="new"))
    lease = claimer(ledger, batch_size=4, max_staleness_versions=3).next()
    assert names(lease) == ["new0", "new1", "new2", "new3"]
    with ledger.read() as connection:
        assert count_by_state(connection)["DISCARDED"] == 4


def test_a_row_of_a_version_far_behind_is_not_claimed_with_a_late_turn_of_its_trajectory(ledger):
    publish_versions(ledger, 8)
    with ledger.write() as connection:
        transitions.record(connection, samples_of(rows(1, version=1, name="old")))
        connection.execute(update(experiences).values(conversation_id="a"))
    record_ready(ledger, rows(1, version=7, name="other"))
    mine = claimer(ledger, batch_size=1, max_staleness_versions=3)
    assert names(mine.next()) == ["other0"]
    record_ready(ledger, [replace(row, conversation_id="a") for row in rows(1, version=7, name="late")])
    assert names(mine.next()) == ["late0"]


def test_one_key_fills_only_its_share_of_a_batch(ledger):
    record_ready(ledger, rows(10, name="angry"), key_name="angry")
    assert claim_names(ledger, at_least=8, share=0.5) is None
    record_ready(ledger, rows(10, name="calm"), key_name="calm")
    taken = claim_names(ledger, at_least=8, share=0.5)
    assert taken == [*(f"angry{n}" for n in range(4)), *(f"calm{n}" for n in range(4))]


def test_a_batch_that_waits_for_other_keys_says_so_once(ledger, caplog):
    caplog.set_level("INFO", logger="flywheel")
    record_ready(ledger, rows(8), key_name="the only one")
    config = TrainerConfig(batch_size=8, poll_interval_s=0.02, max_share_per_key=0.5)
    assert Claimer(ledger, config, StopAfterPolls(10)).next() is None
    (line,) = [one.getMessage() for one in caplog.records if "not whole without rows that wait" in one.getMessage()]
    assert "max_share_per_key=0.5" in line and "batch_timeout_s=null" in line


def claim_names(ledger: Ledger, *, at_least: int, share: float) -> list[str] | None:
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=at_least, at_most=8, lease_s=60, share_per_key=share)
        return None if batch is None else names(queries.load_lease(connection, batch))


def test_a_batch_that_fails_is_tried_again_and_halved_until_the_bad_row_stands_alone(ledger):
    record_ready(ledger, rows(8))
    sizes, trained = [], []
    mine = claimer(ledger, batch_size=8)
    while len(trained) < 7:
        lease = mine.next()
        sizes.append(len(lease.rows))
        with ledger.write() as connection:
            if "m5" in names(lease):
                transitions.fail_update(connection, lease.batch_id, "it is bad")
            else:
                trained += names(lease)
                about = {"version": len(sizes), "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
                transitions.publish(connection, **about, batch_ids=[lease.batch_id])
        mine.search_anew()
    assert sizes == [8, 8, 4, 4, 2, 1, 1, 2]
    assert trained == ["m0", "m1", "m2", "m3", "m4", "m6", "m7"]
    with ledger.read() as connection:
        assert quarantined(connection) == {"quarantined: the update failed with it alone: it is bad": 1}
        assert count_by_state(connection)["CONSUMED"] == 7


def test_trainers_that_die_in_an_update_come_to_the_bad_row_as_well(ledger):
    record_ready(ledger, rows(4))
    deaths = 0
    for life in range(40):
        lease = claimer(ledger, batch_size=4, batch_timeout_s=0.01).next()
        with ledger.write() as connection:
            transitions.mark_updating(connection, lease.batch_id, updating=True)
            if "m1" in names(lease):
                deaths += 1
                transitions.give_back(connection, owner="trainer")
            else:
                about = {"version": life, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
                transitions.publish(connection, **about, batch_ids=[lease.batch_id])
            counted = count_by_state(connection)
        if not counted["READY"]:
            break
    with ledger.read() as connection:
        assert (counted["CONSUMED"], counted["DISCARDED"]) == (3, 1)
        assert deaths == DEATHS_TOLERATED + 4  # two of the whole batch are failures, then a half, then the row alone
        assert list(quarantined(connection).values()) == [1]


def test_a_trainer_that_stops_or_dies_beside_its_updates_blames_no_row(ledger):
    record_ready(ledger, rows(4))
    for _ in range(DEATHS_TOLERATED + 3):
        lease = claimer(ledger, batch_size=4).next()
        assert len(lease.rows) == 4
        with ledger.write() as connection:
            for updating in (True, False):
                transitions.mark_updating(connection, lease.batch_id, updating=updating)
            transitions.give_back(connection, owner="trainer")


def test_a_token_that_the_model_does_not_know_is_quarantined_and_the_rest_is_claimed(ledger):
    strange = replace(rows(1)[0], msg_id="strange", tokens=Tokens(*(np.array([n]) for n in (1, 500)), np.array([-1.0])))
    record_ready(ledger, [*rows(2), strange])
    mine = Claimer(ledger, TrainerConfig(batch_size=3, poll_interval_s=0.02), StopRequest(), vocabulary=208)
    assert names(mine.next()) == ["m0", "m1"]
    with ledger.read() as connection:
        assert quarantined(connection) == {"quarantined: a token id is outside of the model's vocabulary of 208": 1}


def test_a_conversation_of_many_rows_is_claimed_in_parts(ledger):
    record_ready(ledger, [*turns("a", 10), *rows(2)])
    mine = claimer(ledger, batch_size=3, max_trajectory_rows=4)
    assert [names(mine.next()) for _ in range(3)] == [
        [f"a-{n}" for n in range(4)],
        [f"a-{n}" for n in range(4, 8)],
        ["a-8", "a-9", "m0"],
    ]


def test_a_row_longer_than_an_update_has_room_for_is_quarantined_and_the_others_are_claimed(ledger):
    long, *others = rows(3)
    tokens = Tokens(np.ones(9, np.int32), np.ones(2, np.int32), np.full(2, -0.5, np.float32))
    record_ready(ledger, [replace(long, tokens=tokens), *others])
    lease = claimer(ledger, batch_size=3, max_trajectory_tokens=10).next()
    assert names(lease) == [row.msg_id for row in others]
    with ledger.read() as connection:
        ((reason, count),) = quarantined(connection).items()
        assert count == 1 and reason.startswith("quarantined: it has more tokens than the 10 that are trained on")
