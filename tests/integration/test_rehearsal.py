"""Written answers and words that were trained on are added to later batches: drawn by the seed, marked, only read."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, select

from shared.config import RewardConfig, TrainerConfig
from shared.experience import Experience
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, lineage
from shared.reward import Kind, Signal
from shared.stop_request import StopRequest
from tests.support.plans import plans_of
from tests.support.samples import sample
from trainer_service.batch import make_batch
from trainer_service.claim import Claimer

MIX: dict[str, Any] = {"algorithms": {"reinforce_pp": 1.0, "sft": 0.2}, "batch_size": 4, "poll_interval_s": 0.02}
WRITTEN: frozenset[Kind] = frozenset({"correction", "demonstration"})
SHOWN, CORRECTED, UP = Signal("demonstration"), Signal("correction", text="yes"), Signal("rating", text="up")


@pytest.fixture
def ledger(ledger):
    """A ledger in which ten demonstrations, a correction, one of a whole and a rating were trained on."""
    make_ready(ledger, {**{f"shown-{number}": SHOWN for number in range(10)}, "corrected": CORRECTED, "rated": UP})
    make_ready(ledger, {"whole": CORRECTED}, scope="conversation")
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=13, at_most=13, lease_s=60)
        about: dict[str, Any] = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[batch])
    make_ready(ledger, {f"new-{number}": UP for number in range(4)})
    return ledger


def make_ready(ledger: Ledger, said: dict[str, Signal], *, known: bool = False, **about: Any) -> None:
    """known: the rows are in the ledger."""
    about |= {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": config().learns_from}
    with ledger.write() as connection:
        transitions.record(connection, [] if known else [sample(name) for name in said])
        for name, signal in said.items():
            transitions.apply_feedback(connection, msg_ids=[name], signals=[signal], **about)
        transitions.commit(connection)


def config(**more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({**MIX, **more})


def serve_first_versions(ledger: Ledger) -> None:
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        for version in (0, 1):
            transitions.serve_version(connection, version, by="an engine")


def claimed(ledger: Ledger, **more: Any) -> list[Experience]:
    lease = Claimer(ledger, config(**more), StopRequest()).next()
    assert lease is not None
    return lease.rows


def test_a_share_of_the_batch_is_added_of_what_was_trained_on_and_marked(ledger):
    rows = claimed(ledger, rehearse=0.5)
    assert [row.msg_id for row in rows if not row.is_rehearsal] == [f"new-{number}" for number in range(4)]
    again = [row for row in rows if row.is_rehearsal]
    assert 1 <= len(again) <= 2 and {row.msg_id for row in again} <= {"corrected", *(f"shown-{n}" for n in range(10))}
    assert all(row.own_reward is None for row in again)
    assert not any(row.is_rehearsal for row in claimed_again(ledger, rehearse=0.0))


def claimed_again(ledger: Ledger, **more: Any) -> list[Experience]:
    """After a crash."""
    with ledger.write() as connection:
        assert transitions.give_back(connection, owner="trainer") == 4
    return claimed(ledger, **more)


def test_the_same_batch_gets_the_same_ones_after_a_crash_and_another_seed_draws_others(ledger):
    first = [row.msg_id for row in claimed(ledger, rehearse=0.75)]
    assert [row.msg_id for row in claimed_again(ledger, rehearse=0.75)] == first
    assert any([row.msg_id for row in claimed_again(ledger, rehearse=0.75, seed=n)] != first for n in range(1, 4))


@pytest.mark.parametrize("is_stored", [True, False], ids=["lineage is stored", "by an older Flywheel"])
def test_rows_that_a_rejected_version_learned_are_not_drawn(ledger, is_stored):
    with ledger.write() as connection:
        if not is_stored:
            connection.execute(lineage.delete())
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.serve_version(connection, 0, by="an engine")
        transitions.roll_back(connection, 0, by="operator")
    assert not any(row.is_rehearsal for row in claimed(ledger, rehearse=3.0))


def test_words_that_a_rejected_version_learned_of_a_row_that_an_earlier_one_was_trained_on_are_not_drawn(ledger):
    serve_first_versions(ledger)
    make_ready(ledger, {"rated": CORRECTED}, known=True)
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=5, at_most=5, lease_s=60)
        about: dict[str, Any] = {"version": 2, "parent": 1, "kind": "full", "step": 2, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[batch])
        transitions.serve_version(connection, 2, by="an engine")
        assert transitions.roll_back(connection, 1, by="operator").rejected == [2]
    make_ready(ledger, {f"newer-{number}": UP for number in range(4)})
    again = [row.msg_id for row in claimed(ledger, rehearse=3.0) if row.is_rehearsal]
    assert "shown-0" in again and "rated" not in again


def test_words_that_a_rejected_version_learned_are_not_drawn_whoever_holds_the_row_next(ledger):
    """Rejected: neither the first version that was trained on the row nor the last."""
    serve_first_versions(ledger)
    learn_of_rated(ledger, CORRECTED, 2, parent=1)
    with ledger.write() as connection:
        transitions.serve_version(connection, 2, by="an engine")
        assert transitions.roll_back(connection, 1, by="operator").rejected == [2]
    learn_of_rated(ledger, Signal("correction", text="no"), 3, parent=1)
    make_ready(ledger, {f"newer-{number}": UP for number in range(4)})
    again = [row.msg_id for row in claimed(ledger, rehearse=4.0) if row.is_rehearsal]
    assert "shown-0" in again and "rated" not in again


def learn_of_rated(ledger: Ledger, said: Signal, version: int, parent: int) -> None:
    make_ready(ledger, {"rated": said}, known=True)
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=1, at_most=5, lease_s=60)
        about: dict[str, Any] = {"version": version, "parent": parent, "kind": "full", "step": version}
        transitions.publish(connection, **about, trainer="trainer", batch_ids=[batch])


@pytest.mark.parametrize("is_stored", [True, False], ids=["lineage is stored", "by an older Flywheel"])
def test_what_only_a_version_that_was_withdrawn_or_rehearsed_it_learned_is_drawn(ledger, is_stored):
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        about: dict[str, Any] = {"parent": 1, "kind": "full", "step": 2, "trainer": "trainer"}
        transitions.publish(connection, version=2, trained_on=range(1, 14), **about)
        for version in (0, 1, 2):
            transitions.serve_version(connection, version, by="an engine")
        assert transitions.roll_back(connection, 1, by="operator").rejected == [2]
        if not is_stored:
            connection.execute(lineage.delete())
        assert "shown-0" in transitions.erase(connection, msg_id="shown-0").names
    again = {row.msg_id for row in claimed(ledger, rehearse=4.0) if row.is_rehearsal}
    assert "shown-1" in again and "shown-0" not in again


def test_what_an_operator_had_trained_again_after_a_rollback_is_drawn(ledger):
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.serve_version(connection, 0, by="an engine")
        assert transitions.roll_back(connection, 0, by="operator", again=True).rejected == [1]
        batch = transitions.claim(connection, owner="trainer", at_least=1, at_most=99, lease_s=60)
        about: dict[str, Any] = {"version": 2, "parent": 0, "kind": "full", "step": 1, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[batch])
    make_ready(ledger, {f"newer-{number}": UP for number in range(4)})
    again = [row.msg_id for row in claimed(ledger, rehearse=4.0) if row.is_rehearsal]
    assert "shown-0" in again


def test_no_state_changes_and_what_there_is_bounds_the_draw(ledger):
    columns = (experiences.c.msg_id, experiences.c.state, experiences.c.taught, experiences.c.batch_id)
    query = select(*columns).where(experiences.c.msg_id.not_like("new-%")).order_by(experiences.c.id)
    with ledger.read() as connection:
        before = connection.execute(query).all()
        fresh = [row for row in claimed(ledger) if not row.is_rehearsal]
        drawn = queries.draw_rehearsal(connection, 1.0, fresh * 10, 0, WRITTEN, None, None)
    assert sorted(row.msg_id for row in drawn) == ["corrected", *(f"shown-{number}" for number in range(10))]
    with ledger.write() as connection:
        assert transitions.give_back(connection, owner="trainer") == 4, "rehearsed rows are nobody's lease"
        assert connection.execute(query).all() == before


def test_rows_that_were_erased_or_quarantined_are_not_in_the_pool(ledger):
    with ledger.write() as connection:
        for name in ("shown-0", "corrected", "new-0"):  # trained on, and never trained on
            transitions.erase(connection, msg_id=name)
    make_ready(ledger, {"shown-1": UP}, known=True)
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=1, at_most=64, lease_s=60)
        rows = queries.load_lease(connection, batch, kinds=WRITTEN | {"rating"}).rows
        again = next(row.id for row in rows if row.msg_id == "shown-1")
        transitions.quarantine(connection, {again: "the update failed with it alone"})
        fresh = [row for row in rows if row.id != again]
        drawn = queries.draw_rehearsal(connection, 3.0, fresh, 0, WRITTEN, None, None)
        assert sorted(row.msg_id for row in drawn) == [f"shown-{number}" for number in range(2, 10)]
        for seed in range(20):
            drawn = queries.draw_rehearsal(connection, 1 / 3, fresh, seed, {"demonstration"}, None, None)
            assert len(drawn) == 1, "nothing is drawn in vain"


def test_only_written_answers_are_learnt_of_them_and_they_are_not_counted_as_new(ledger):
    rows = claimed(ledger, rehearse=0.5)
    batch = make_batch(rows)
    fresh = {row.id for row in rows if not row.is_rehearsal}
    assert {row_id for places in batch.members for p in places for row_id in batch.sequences[p].row_ids} == fresh
    again = [batch.sequences[place] for place in batch.written]
    drawn = [row for row in rows if row.is_rehearsal and row.msg_id != "corrected"]
    assert len(again) == len(batch.rehearsed) == len(drawn)
    assert not fresh & {row_id for sequence in again for row_id in sequence.row_ids}
    assert batch.pairs == [] and not set(batch.rewarded) & set(batch.written)


def test_what_can_be_rehearsed_is_found_by_an_index(ledger):
    def draw(connection: Connection) -> None:
        queries.draw_rehearsal(connection, 1.0, [], 0, WRITTEN, None, None)

    statement, plan = plans_of(ledger, draw)[0]
    assert "ix_experiences_rehearsable" in plan, (statement, plan)
