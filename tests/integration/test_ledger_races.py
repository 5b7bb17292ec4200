"""Transactions that meet at the same rows of PostgreSQL: each row ends as if one had come after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, func, insert, select, update

from services.samples import ImportedRow, store
from shared.config import RewardConfig
from shared.errors import CannotServe, RolledBack
from shared.experience import BatchState, State
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import batches, experiences, payloads, signals
from shared.reward import Lesson, Signal
from tests.support.experiences import record_ready, rows
from tests.support.samples import sample


@pytest.fixture
def ledger(postgres) -> Iterator[Ledger]:
    opened = Ledger.open(postgres.new_ledger().replace("postgresql://", "postgresql+psycopg://"))
    yield opened
    opened.close()


def say(connection: Connection, text: str) -> list[transitions.Receipt]:
    about: dict[str, Any] = {"msg_ids": ["m0"], "task_id": None, "run_id": None, "rule": RewardConfig()}
    said = [Signal("comment", text=text)]
    return transitions.apply_feedback(connection, **about, signals=said, learned=frozenset(("reward", "comment")))


def meet(ledger: Ledger, first: Callable[[Connection], object], second: Callable[[Connection], object]) -> None:
    """The second begins while the first holds its rows, and waits for them."""

    def run() -> None:
        with ledger.write() as connection:
            second(connection)

    thread = threading.Thread(target=run)
    with ledger.write() as connection:
        first(connection)
        thread.start()
        wait_for_lock(ledger)
    thread.join(240)
    assert not thread.is_alive()


def wait_for_lock(ledger: Ledger) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    ended = threading.Event()
    while not ended.wait(0.02):
        with ledger.read() as connection:
            if connection.exec_driver_sql(waiting).scalar_one():
                ended.set()


def test_all_queries_of_a_reader_see_the_same_rows(ledger):
    record_ready(ledger, rows(2))
    with ledger.read() as connection:
        before = sum(queries.count_by_state(connection).values())
        with ledger.write() as writing:
            writing.execute(experiences.delete().where(experiences.c.msg_id == "m0"))
        assert sum(queries.count_by_state(connection).values()) == before
    with ledger.read() as connection:
        assert sum(queries.count_by_state(connection).values()) == before - 1


def test_two_runs_that_begin_alike_are_continued_once_each(ledger):
    """Two explorers record the second turns of two runs with the same first turn, at the same moment."""
    with ledger.write() as connection:
        transitions.record(connection, [sample(name, exchange=b"1" * 8) for name in ("a1", "b1")])
    turns = [sample(name, exchange=b"2" * 8, extends=(b"1" * 8,)) for name in ("a2", "b2")]
    meet(ledger, *(partial(transitions.record, samples=[turn]) for turn in turns))
    parents = select(experiences.c.msg_id, experiences.c.parent_id).where(experiences.c.parent_id.is_not(None))
    with ledger.read() as connection:
        assert dict(connection.execute(parents).all()) == {"a2": "a1", "b2": "b1"}


def claim(ledger: Ledger) -> int:
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=9, lease_s=3600)
        assert batch is not None
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        return batch


def publish(connection: Connection, batch: int) -> None:
    about: dict[str, Any] = {"version": 1, "parent": 0, "kind": "full", "step": 1, "trainer": "t", "state_path": "x"}
    transitions.publish(connection, **about, batch_ids=[batch])


def consume(ledger: Ledger) -> None:
    batch = claim(ledger)
    with ledger.write() as connection:
        publish(connection, batch)


def erase(connection: Connection) -> None:
    transitions.erase(connection, msg_id="m0")


def test_what_is_said_while_a_message_is_erased_is_erased_with_it(ledger):
    record_ready(ledger, rows(1))
    meet(ledger, lambda c: say(c, "private"), erase)
    with ledger.read() as connection:
        assert connection.execute(select(func.count()).select_from(signals)).scalar() == 0


def test_a_row_of_which_something_is_said_while_it_is_to_be_removed_keeps_its_tokens(ledger):
    record_ready(ledger, rows(1))
    consume(ledger)
    with ledger.read() as connection:
        ids = queries.oldest_done(connection, before=None, at_most=9)
    assert len(ids) == 1
    meet(ledger, lambda c: say(c, "late"), lambda c: transitions.remove(c, ids))
    with ledger.read() as connection:
        left = connection.execute(select(experiences.c.id).join(payloads)).scalars().all()
        said = connection.execute(select(signals.c.kind).order_by(signals.c.id)).scalars().all()
    assert (left, said) == (ids, ["reward", "comment"])


def test_a_row_that_is_erased_while_it_is_to_be_removed_stays_with_its_lineage(ledger):
    with ledger.write() as connection:
        transitions.record(connection, [sample("m0")])
        connection.execute(update(experiences).values(state=State.DISCARDED))
        ids = connection.execute(select(experiences.c.id)).scalars().all()
    removed: list[int] = []
    meet(ledger, erase, lambda c: removed.extend(transitions.remove(c, ids, {})))
    with ledger.read() as connection:
        assert (removed, connection.execute(select(experiences.c.id)).scalars().all()) == ([], ids)


def test_a_trained_row_that_is_erased_during_a_commit_of_what_was_said_of_it_is_not_trained_again(ledger):
    record_ready(ledger, rows(1))
    consume(ledger)
    with ledger.write() as connection:
        say(connection, "late")
    meet(ledger, erase, transitions.commit)
    with ledger.read() as connection:
        assert connection.execute(select(experiences.c.state)).scalar() == State.CONSUMED


def test_a_trained_turn_that_is_erased_during_a_commit_of_its_trajectory_is_not_trained_again(ledger):
    with ledger.write() as connection:
        for name in ("m0", "m1"):
            transitions.record(connection, [sample(name, task_id="t", run_id="1")])
        say(connection, "early")
        transitions.commit(connection)
    consume(ledger)
    with ledger.write() as connection:
        connection.execute(update(experiences).values(teaches=0, taught=int(Lesson.COMMENT)))
        about: dict[str, Any] = {"msg_ids": ["m1"], "task_id": None, "run_id": None, "rule": RewardConfig()}
        transitions.apply_feedback(connection, **about, signals=[Signal("reward", value=1.0)])
    meet(ledger, erase, transitions.commit)
    with ledger.read() as connection:
        states = connection.execute(select(experiences.c.state).order_by(experiences.c.id)).scalars().all()
    assert states == [State.CONSUMED, State.READY]


def test_an_expired_lease_that_is_renewed_while_it_is_to_be_taken_back_stays(ledger):
    record_ready(ledger, rows(1))
    with ledger.write() as connection:
        transitions.claim(connection, owner="t", at_least=1, at_most=9, lease_s=-1)
    with ledger.write() as heartbeat:
        transitions.extend_lease(heartbeat, owner="t", lease_s=60)
        with ledger.write() as connection:
            assert transitions.give_back(connection) == 0, "and nobody waits for it"
    with ledger.read() as connection:
        states = [connection.execute(select(table.c.state)).scalar_one() for table in (batches, experiences)]
    assert states == [BatchState.LEASED, State.LEASED]


def test_what_is_said_while_rewards_are_made_anew_is_the_last_word(ledger):
    record_ready(ledger, rows(1))
    how = (RewardConfig(), frozenset(("reward",)))

    def reward(connection: Connection) -> None:
        about: dict[str, Any] = {"msg_ids": ["m0"], "task_id": None, "run_id": None, "rule": RewardConfig()}
        transitions.apply_feedback(connection, **about, signals=[Signal("reward", value=-7.0)])

    meet(ledger, lambda c: transitions.recompute_rewards(c, *how), reward)
    with ledger.read() as connection:
        assert connection.execute(select(experiences.c.reward)).scalar() == -7.0


def test_a_comment_during_the_publication_of_its_row_still_acts_later(ledger):
    record_ready(ledger, rows(1))
    with ledger.write() as connection:
        say(connection, "too long")
    batch = claim(ledger)
    meet(ledger, lambda c: say(c, "too rude"), lambda c: publish(c, batch))
    with ledger.read() as connection:
        teaches, taught = connection.execute(select(experiences.c.teaches, experiences.c.taught)).one()
    assert (teaches, taught) == (Lesson.COMMENT, Lesson.COMMENT | Lesson.REWARD)


@pytest.fixture
def served(ledger) -> Ledger:
    """Versions 0 to 2 of the trainer t, all proven."""
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        for version in (1, 2):
            publish_version(connection, version)
            transitions.serve_version(connection, version, by="an engine")
    return ledger


def publish_version(connection: Connection, version: int) -> None:
    """As a trainer does, which knows of no rollback."""
    transitions.require_not_rolled_back(connection, trainer="t", rollbacks=0)
    about = {"kind": "full", "step": version, "trainer": "t", "state_path": f"s{version}"}
    transitions.publish(connection, version=version, parent=version - 1, **about)


def test_a_version_that_is_being_published_during_a_rollback_is_rejected_too(served):
    done: list[transitions.Rollback] = []
    roll_back = partial(transitions.roll_back, to=1, by="operator")
    meet(
        served, lambda connection: publish_version(connection, 3), lambda connection: done.append(roll_back(connection))
    )
    assert done[0].rejected == [2, 3]


def test_a_trainer_that_publishes_during_a_rollback_is_told_of_it(served):
    def is_told(connection: Connection) -> None:
        with pytest.raises(RolledBack, match="gone back to version 1"):
            publish_version(connection, 3)

    meet(served, partial(transitions.roll_back, to=1, by="operator"), is_told)
    assert len(served.fetch(queries.list_versions)) == 3


def test_a_heartbeat_holds_no_lock_that_a_trainer_which_publishes_needs(served):
    with served.write() as connection:
        about = {"owner": "t", "state": "LEASED", "lease_until": 1.0, "created_at": 0.0}
        batch = connection.execute(insert(batches).values(about).returning(batches.c.id)).scalar_one()

    def beat() -> None:
        with served.write() as connection:
            transitions.extend_lease(connection, owner="t", lease_s=60.0)

    heartbeat = threading.Thread(target=beat)
    with served.write() as connection:
        transitions.require_not_rolled_back(connection, trainer="t", rollbacks=0)
        heartbeat.start()
        wait_for_lock(served)
        transitions.mark_updating(connection, batch, updating=True)  # of two that wait for each other, one would fail
    heartbeat.join(240)
    with served.read() as connection:
        assert connection.execute(select(batches.c.updating, batches.c.lease_until > 1.0)).one() == (True, True)


def test_of_two_operators_who_promote_at_once_the_later_one_decides(served):
    def promote(version: int) -> Callable[[Connection], object]:
        return partial(transitions.share_traffic, weights={version: 1.0}, at_most=1, by="operator")

    meet(served, promote(1), promote(2))
    assert served.fetch(queries.shares_of_traffic) == {2: 1.0}


def test_a_version_that_is_promoted_during_a_rollback_which_rejects_it_is_refused(served):
    def is_refused(connection: Connection) -> None:
        with pytest.raises(CannotServe, match="version 2 is REJECTED"):
            transitions.share_traffic(connection, {2: 1.0}, at_most=1, by="operator")

    meet(served, partial(transitions.roll_back, to=1, by="operator"), is_refused)
    assert served.fetch(queries.shares_of_traffic) == {}


def test_a_rollback_during_a_promotion_takes_the_chats_back(served):
    promote = partial(transitions.share_traffic, weights={2: 1.0}, at_most=1, by="operator")
    meet(served, promote, partial(transitions.roll_back, to=1, by="operator"))
    assert served.fetch(queries.shares_of_traffic) == {1: 1.0}


def test_an_import_holds_up_no_chat_that_continues_an_equal_exchange(ledger):
    one = b"1" * 8
    with ledger.write() as connection:  # two equal exchanges that both have a next turn
        transitions.record(connection, [sample(name, exchange=one) for name in ("a1", "b1")])
        for name in ("a2", "b2"):
            transitions.record(connection, [sample(name, exchange=name.encode() * 4, extends=(one,))])
    given = {"rule": RewardConfig(), "learned": frozenset(("reward",)), "default_reward": None}
    with ledger.write() as importing:
        store(importing, [ImportedRow(sample("i2", extends=(one,)), [], None)], **given)
        with ledger.write() as chat:
            chat.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
            transitions.record(chat, [sample("c2", extends=(one,))])
