"""On PostgreSQL, transactions lock versions, batches and rows in the order of their numbers, and so do not deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, Connection, func, select, update

from shared.config import RewardConfig, TrainerConfig
from shared.experience import Purpose
from shared.ledger import transitions
from shared.ledger.connect import Ledger, database_time
from shared.ledger.tables import batches, experiences, trainers, versions
from shared.reward import Lesson
from tests.integration.test_ledger_races import wait_for_lock
from tests.integration.test_lessons_after_failures import publish_base
from tests.support.lessons import RUN, UP, claim, commit, record, say, stands
from tests.support.polls import StopAfterPolls
from trainer_service.claim import Claimer
from trainer_service.loop import Trainer
from trainer_service.rollback import RollbackGuard

Work = Callable[[Connection], object]
CONFIG = SimpleNamespace(trainer=TrainerConfig(name="trainer"), reward=RewardConfig())


@pytest.fixture
def ledger(postgres) -> Iterator[Ledger]:
    opened = Ledger.open(postgres.new_ledger().replace("postgresql://", "postgresql+psycopg://"))
    publish_base(opened)
    yield opened
    opened.close()


def store_newest_first(connection: Connection) -> None:
    connection.exec_driver_sql("CREATE INDEX newest_first ON experiences (id DESC)")
    connection.exec_driver_sql("CLUSTER experiences USING newest_first")


def locks_in_order(ledger: Ledger, work: Work, key: Column[int] = experiences.c.id, *, later: int = 2) -> bool:
    """Whether the work, while it waits for number 1, has not locked the later one yet."""

    def run() -> None:
        with ledger.write() as connection:
            for scan in ("indexscan", "bitmapscan"):  # rows are read as they are stored
                connection.exec_driver_sql(f"SET LOCAL enable_{scan} = off")
            work(connection)

    thread = threading.Thread(target=run)
    with ledger.write() as connection:
        connection.execute(select(key).where(key == 1).with_for_update())
        thread.start()
        wait_for_lock(ledger)
        free = select(key).where(key == later).with_for_update(skip_locked=True)
        is_free = connection.execute(free).first() is not None
    thread.join(240)
    assert not thread.is_alive()
    return is_free


def hold_two_turns(ledger: Ledger) -> int:
    """Return the batch of a run with two rows, which are stored newest first."""
    record(ledger, "a", "b", **RUN)
    say(ledger, "b", UP)
    commit(ledger)
    lease = claim(ledger)
    assert lease is not None and len(lease.rows) == 2
    with ledger.write() as connection:
        store_newest_first(connection)
    return lease.batch_id


def test_a_batch_whose_trainer_died_in_an_update_is_taken_back_oldest_row_first(ledger):
    batch = hold_two_turns(ledger)
    with ledger.write() as connection:
        transitions.mark_updating(connection, batch, updating=True)
    assert locks_in_order(ledger, lambda c: transitions.give_back(c, owner="t"))
    assert stands(ledger, "state", "deaths") == [("READY", 1), ("READY", 1)]


def test_rows_of_a_failed_update_are_quarantined_oldest_first(ledger):
    batch = hold_two_turns(ledger)
    with ledger.write() as connection:
        connection.execute(update(experiences).values(failures=1))
        connection.exec_driver_sql("CLUSTER experiences")
    assert locks_in_order(ledger, lambda c: transitions.fail_update(c, batch, "no number"))
    assert stands(ledger, "state") == [("DISCARDED",), ("DISCARDED",)]


def test_rows_expire_oldest_first(ledger):
    record(ledger, "a", "b")
    with ledger.write() as connection:
        store_newest_first(connection)
    assert locks_in_order(ledger, lambda c: transitions.expire(c, before=1e12))
    assert stands(ledger, "state") == [("DISCARDED",), ("DISCARDED",)]


def test_a_stale_row_that_another_transaction_has_locked_is_discarded_later(ledger):
    record(ledger, "a", "b", version=0)
    for name in ("a", "b"):
        say(ledger, name, UP)
    commit(ledger)
    with ledger.write() as connection:
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
    discard = partial(transitions.discard_stale, at_most_behind=0)
    with ledger.write() as other:
        other.execute(select(experiences.c.id).where(experiences.c.id == 1).with_for_update())
        with ledger.write() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '5s'")
            assert discard(connection) == 1
    assert stands(ledger, "state") == [("READY",), ("DISCARDED",)]
    with ledger.write() as connection:
        assert discard(connection) == 1


def test_a_state_with_several_versions_consumes_its_rows_oldest_first(ledger):
    record(ledger, "a", "b")
    contained: dict[int, list[int]] = {}
    for version, name in ((1, "b"), (2, "a")):
        say(ledger, name, UP)
        commit(ledger)
        lease = claim(ledger)
        assert lease is not None
        contained[version] = [lease.batch_id]
    state = {"trainer": "t", "version": 2, "step": 2, "state_path": "s", "state_sha256": None}
    assert locks_in_order(ledger, lambda c: transitions.record_state(c, **state, contained=contained))
    assert stands(ledger, "state", "taught", "consumed_version") == [("CONSUMED", Lesson.REWARD, v) for v in (2, 1)]


def expired_batches(ledger: Ledger) -> None:
    """Two trainers live, and could not reach the ledger for longer than their leases last."""
    for name in ("t", "u"):
        record(ledger, name)
        say(ledger, name, UP)
        commit(ledger)
        with ledger.write() as connection:
            about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
            transitions.announce_trainer(connection, name=name, **about)
            assert transitions.claim(connection, owner=name, at_least=1, at_most=9, lease_s=-1)


def test_a_trainer_takes_back_no_batch_whose_lease_is_being_extended_and_waits_for_none(ledger):
    expired_batches(ledger)
    claimer = Claimer(ledger, TrainerConfig(name="t", poll_interval_s=0.02), StopAfterPolls(1))
    thread = threading.Thread(target=claimer.next)
    with ledger.write() as connection:
        transitions.extend_lease(connection, owner="u", lease_s=600)
        thread.start()
        thread.join(60)
        is_waiting = thread.is_alive()
    thread.join(240)
    assert not is_waiting and not thread.is_alive()
    with ledger.read() as connection:
        live = (batches.c.state == "LEASED", batches.c.lease_until > database_time(connection))
        assert connection.execute(select(func.count()).where(*live)).scalar() == 2


def serve(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        with ledger.write() as connection:
            transitions.publish(connection, version=number, parent=number - 1, kind="full", step=number, size=1)
            assert transitions.serve_version(connection, number, by="an engine")


def test_an_expired_lease_that_is_renewed_during_a_deletion_of_versions_keeps_the_files(ledger):
    serve(ledger, 1, 2, 3)

    def lease(connection: Connection, reader: str, lasts_s: float) -> bool:
        about = {"purpose": Purpose.LOADING, "owner": "elsewhere-1-1-1"}
        return transitions.lease_version(connection, 1, reader=reader, lasts_s=lasts_s, **about)

    with ledger.write() as connection:
        assert lease(connection, "http://e0", -5)
    given_up: list[int] = []

    def clean() -> None:
        limits = {"max_versions": 1, "max_bytes": 1e9, "sizes": {}}
        with ledger.write() as connection:
            given_up.extend(transitions.give_up_files(connection, owner="j", **limits, by="j"))

    thread = threading.Thread(target=clean)
    with ledger.write() as connection:
        assert lease(connection, "http://e1", -5)
        thread.start()
        wait_for_lock(ledger)
        assert lease(connection, "http://e0", 600)  # of two that wait for each other, one would fail
    thread.join(240)
    assert not thread.is_alive() and given_up == []


def test_an_engine_that_serves_a_version_locks_the_earlier_ones_before_it(ledger):
    serve(ledger, 1)
    with ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    work = partial(transitions.serve_version, version=2, by="an engine")
    assert locks_in_order(ledger, work, versions.c.version)


def test_a_rollback_locks_the_versions_with_shares_before_those_that_it_rejects(ledger):
    serve(ledger, 1, 2, 3)
    with ledger.write() as connection:
        transitions.share_traffic(connection, {1: 1.0, 3: 1.0}, at_most=2, by="operator")
    work = partial(transitions.roll_back, to=2, by="operator")
    assert locks_in_order(ledger, work, versions.c.version, later=3)


def test_a_tag_that_moves_to_a_later_version_locks_the_earlier_one_first(ledger):
    serve(ledger, 1, 2)
    with ledger.write() as connection:
        assert transitions.tag_version(connection, 1, "good")
    assert locks_in_order(ledger, lambda c: transitions.tag_version(c, 2, "good"), versions.c.version)


def release_leases(ledger: Ledger) -> None:
    """What a trainer does when it stops."""
    stopping: Any = SimpleNamespace(_ledger=ledger, _config=CONFIG)
    Trainer._release_leases(stopping)


def release_unsaved(ledger: Ledger) -> None:
    """What it does after a failed update."""
    about: Any = SimpleNamespace(_config=CONFIG, _saved=SimpleNamespace(version=0))
    with ledger.write() as connection:
        RollbackGuard("trainer").excluded(partial(Trainer._release_unsaved, about))(connection)


@pytest.mark.parametrize("release", [release_leases, release_unsaved])
def test_a_trainer_that_releases_rows_during_a_rollback_waits_for_it_before_it_locks_them(ledger, release):
    record(ledger, "a")
    say(ledger, "a", UP)
    commit(ledger)
    with ledger.write() as connection:
        about = {"step": 0, "version": 0, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="trainer", **about)
        assert transitions.claim(connection, owner="trainer", at_least=1, at_most=9, lease_s=600)
    thread = threading.Thread(target=release, args=(ledger,))
    with ledger.write() as connection:
        connection.execute(select(trainers.c.name).with_for_update())
        thread.start()
        wait_for_lock(ledger)
        for key in (batches.c.id, experiences.c.id):
            assert connection.execute(select(key).with_for_update(skip_locked=True)).first() is not None
    thread.join(240)
    assert not thread.is_alive() and stands(ledger, "state") == [("READY",)]
