"""The database's clock jumps, its host was asleep, or a host's clock is wrong: nobody who lives loses what is theirs.

On both databases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from explorer_service.housekeeping import Housekeeper
from explorer_service.metrics import ExplorerMetrics
from shared.config import Config, ExplorerConfig, RewardConfig, TrainerConfig
from shared.errors import LedgerError
from shared.experience import Purpose, State
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger, database_time
from shared.ledger.tables import batches, engines, experiences, explorers, leases, open_streams, version_leases
from shared.process import process_name
from shared.reward import Signal
from shared.stop_request import StopRequest
from tests.support.experiences import record_ready, rows
from tests.support.samples import sample
from tests.support.servers import make_config, wait_until, write_scripted_version
from trainer_service.claim import Claimer
from trainer_service.heartbeat import Heartbeat
from trainer_service.janitor import Janitor
from trainer_service.resume import StateStore

HOUR_S = 3600.0


class Clock:
    """time.monotonic(), as a test has it."""

    def __init__(self) -> None:
        self.now_s = 10_000.0

    def __call__(self) -> float:
        return self.now_s


class AtOnce:
    """A writer of the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def write(self, work: Callable[[Connection], Any]) -> Any:
        with self._ledger.write() as connection:
            return work(connection)


def jump(connection: Connection) -> None:
    """All that is stored was stored an hour before the time that the database's clock now shows."""
    connection.execute(update(explorers).values(heartbeat_at=explorers.c.heartbeat_at - HOUR_S))
    connection.execute(update(leases).values(until=leases.c.until - HOUR_S))
    connection.execute(update(version_leases).values(until=version_leases.c.until - HOUR_S))


def begin(ledger: Ledger, *names: str) -> None:
    """Explorers that live, of which each loads version 0 and answers a stream."""
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        for name in names:
            transitions.heartbeat(connection, name, {})
            transitions.open_stream(connection, f"stream of {name}", name, transitions.RunName("local", None, None))
            about = {"reader": f"engine of {name}", "purpose": Purpose.LOADING, "owner": name}
            assert transitions.lease_version(connection, 0, **about)


def signed_on(ledger: Ledger) -> set[str]:
    """The explorers that have their row, their lease and their stream."""
    with ledger.read() as connection:
        columns = (explorers.c.id, version_leases.c.owner, open_streams.c.explorer)
        found = [set(connection.execute(select(column)).scalars()) for column in columns]
    return found[0] & found[1] & found[2]


def test_an_explorer_that_runs_on_this_machine_is_not_signed_off_by_another_one_however_old_its_heartbeat_is(ledger):
    other = process_name()
    begin(ledger, other)
    with ledger.write() as connection:
        jump(connection)
        transitions.heartbeat(connection, process_name(), {})
    assert signed_on(ledger) == {other}


def test_an_explorer_whose_own_heartbeat_looks_old_signs_nobody_off_for_that_until_the_next_one(ledger):
    begin(ledger, "here", "elsewhere")
    with ledger.write() as connection:
        jump(connection)
        assert transitions.heartbeat(connection, "here", {}) == {"elsewhere": {}}
    assert signed_on(ledger) == {"here", "elsewhere"}
    with ledger.write() as connection:
        assert transitions.heartbeat(connection, "here", {}) == {}
    assert signed_on(ledger) == {"here"}


def test_a_lease_of_a_process_that_runs_on_this_machine_does_not_end_for_its_age_but_a_pin_does(ledger):
    runs, unknown = process_name(), "a process of another machine"
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        for owner in (runs, unknown):
            about = {"reader": owner, "owner": owner}
            assert transitions.lease_version(connection, 0, purpose=Purpose.ENGINE, **about)
            assert transitions.pin_version(connection, 0, explorer=owner, lasts_s=600.0)
        jump(connection)
        about = {"owner": "janitor", "max_versions": 1, "max_bytes": 1e12, "sizes": {}, "by": "trainer"}
        transitions.give_up_files(connection, **about)
        assert connection.execute(select(version_leases.c.owner, version_leases.c.purpose)).all() == [(runs, "engine")]


def janitor(ledger: Ledger, root: Path, clock: Clock) -> Janitor:
    """Keeps three versions of those there are, 0 to 5, of which an engine serves 1 beside the newest."""
    config = make_config(root, ["http://e0"])
    config = Config.model_validate({**config.model_dump(exclude_unset=True), "versions": {"max_versions": 3}})
    for version in range(6):
        write_scripted_version(root, version, -1.0)
        with ledger.write() as connection:
            parent = version - 1 if version else None
            transitions.publish(connection, version=version, parent=parent, kind="full", step=version)
            transitions.serve_version(connection, version, by="engine e0")
    with ledger.write() as connection:
        transitions.hold_adapters(connection, "http://e0", serves=[1, 5], leaving=[])
    store = StateStore(root, "trainer")
    store.close()
    return Janitor(config, ledger, store, clock)


def kept(root: Path) -> list[int]:
    return sorted(int(folder.name[1:]) for folder in (root / "versions").iterdir())


def test_after_a_jump_the_janitor_deletes_nothing_until_those_who_live_have_renewed_their_leases(ledger, tmp_path):
    clock = Clock()
    cleaner = janitor(ledger, tmp_path, clock)
    cleaner.run(None)
    assert kept(tmp_path) == [0, 1, 4, 5]
    write_scripted_version(tmp_path, 6, -1.0)
    with ledger.write() as connection:
        transitions.publish(connection, version=6, parent=5, kind="full", step=6)
        jump(connection)
    clock.now_s += 10.0 - HOUR_S  # of an hour and ten seconds by the database's clock it has seen ten
    cleaner.run(None)
    clock.now_s += 10.0
    cleaner.run(None)
    assert kept(tmp_path) == [0, 1, 4, 5, 6]
    with ledger.write() as connection:
        transitions.hold_adapters(connection, "http://e0", serves=[5], leaving=[])
        ended = version_leases.c.version == 1
        connection.execute(update(version_leases).where(ended).values(until=database_time(connection) - 1.0))
    clock.now_s += 30.0
    cleaner.run(None)
    assert kept(tmp_path) == [0, 4, 5, 6]


def test_after_an_outage_the_janitor_deletes_nothing_until_those_who_live_have_renewed_their_leases(ledger, tmp_path):
    clock = Clock()
    cleaner = janitor(ledger, tmp_path, clock)
    cleaner.note_contact()
    clock.now_s += 2 * transitions.VERSION_LEASE_S  # in which nobody could renew a lease
    with ledger.write() as connection:
        connection.execute(update(version_leases).values(until=database_time(connection) - 1.0))
    cleaner.run(None)
    assert kept(tmp_path) == [0, 1, 2, 3, 4, 5]
    with ledger.write() as connection:
        transitions.hold_adapters(connection, "http://e0", serves=[1, 5], leaving=[])
    for _ in range(7):
        cleaner.note_contact()
        clock.now_s += 5.0
    cleaner.run(None)
    assert kept(tmp_path) == [0, 1, 4, 5]


def test_a_heartbeat_that_reaches_the_ledger_is_noted_and_no_other(config, ledger, monkeypatch):
    events: list[str] = []
    extend = transitions.extend_lease

    def extend_lease(connection: Connection, **about: Any) -> None:
        if not events:
            events.append("refused")
            raise LedgerError("on purpose")
        extend(connection, **about)
        events.append("extended")

    monkeypatch.setattr(transitions, "extend_lease", extend_lease)
    settings = config.trainer.model_copy(update={"lease_s": 0.1})
    with Heartbeat(ledger, settings, StopRequest(), lambda: events.append("noted")):
        wait_until(lambda: len(events) > 2)
    assert events[:3] == ["refused", "extended", "noted"]


def test_a_heartbeat_that_fails_for_another_reason_ends_the_trainer_with_an_error(config, ledger, monkeypatch):
    def extend_lease(connection: Connection, **about: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(transitions, "extend_lease", extend_lease)
    settings, stop = config.trainer.model_copy(update={"lease_s": 0.1}), StopRequest()
    with pytest.raises(ZeroDivisionError), Heartbeat(ledger, settings, stop):
        wait_until(lambda: bool(stop))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_explorer_whose_host_is_an_hour_ahead_discards_no_row_of_another(ledger, monkeypatch):
    with ledger.write() as connection:
        transitions.record(connection, [sample("chatcmpl-1")])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + HOUR_S)
    housekeeper = Housekeeper(ExplorerConfig(), None, AtOnce(ledger), ExplorerMetrics(), merges_counts=False)
    asyncio.run(housekeeper._expire(HOUR_S / 2))
    with ledger.read() as connection:
        assert queries.count_by_state(connection)[State.RECORDED] == 1


@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_row_has_the_age_that_the_database_s_clock_gives_it_whatever_its_explorer_s_host_shows(
    off_s, ledger, scripted_engine, start_explorer, monkeypatch
):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + off_s)
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    reply = explorer.chat()
    assert reply.status_code == 200
    with ledger.read() as connection:
        stored_at = connection.execute(select(experiences.c.created_at)).scalar_one()
        age_s = database_time(connection) - stored_at
    assert 0 <= age_s < HOUR_S / 2
    housekeeper = Housekeeper(ExplorerConfig(), None, AtOnce(ledger), ExplorerMetrics(), merges_counts=False)
    asyncio.run(housekeeper._expire(HOUR_S / 2))
    receipts = explorer.http.post("/feedback", json={"msg_ids": [reply.json()["id"]], "reward": 1}).json()["receipts"]
    assert [receipt["state"] for receipt in receipts] == ["applied"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_reward_from_an_explorer_whose_host_is_an_hour_behind_waits_for_the_other_runs_of_its_task(
    ledger, monkeypatch
):
    now = time.time()
    with ledger.write() as connection:
        transitions.record(connection, [sample("m", task_id="t", run_id="1")])
    monkeypatch.setattr(time, "time", lambda: now - HOUR_S)
    about: dict[str, Any] = {"msg_ids": ["m"], "task_id": None, "run_id": None, "rule": RewardConfig()}
    group: dict[str, Any] = {"whole": "task", "runs_of_task": 2, "wait_s": 60.0}
    with ledger.write() as connection:
        transitions.apply_feedback(connection, **about, signals=[Signal("reward", value=1.0)])
        assert transitions.commit(connection) == (1, 1)
        assert transitions.claim(connection, owner="t", at_least=1, at_most=1, lease_s=60.0, **group) is None


def test_an_owner_keeps_its_engine_and_its_turn_when_the_clock_is_set_back_a_little(ledger):
    with ledger.write() as connection:
        for back_s, is_kept in ((0.0, True), (1.0, True), (HOUR_S, False)):
            assert transitions.acquire_engine(connection, "http://e0", "a")
            assert transitions.acquire_lease(connection, "reload", "a")
            for table, column in ((engines, engines.c.owner_until), (leases, leases.c.until)):
                connection.execute(update(table).values({column.name: column + back_s}))
            assert transitions.acquire_engine(connection, "http://e0", "b") is not is_kept
            assert transitions.acquire_lease(connection, "reload", "b") is not is_kept


def test_a_trainer_keeps_the_leases_of_its_own_that_look_expired_and_takes_another_one_s_back(ledger):
    record_ready(ledger, rows(6))
    for name in ("own", "other"):
        claim(ledger, name)
    with ledger.write() as connection:
        connection.execute(update(batches).values(lease_until=database_time(connection) - HOUR_S))
    taken = claim(ledger, "own") + claim(ledger, "own")
    assert sorted(taken) == ["m2", "m3", "m4", "m5"], "what is in its weights already is not trained again"


def claim(ledger: Ledger, name: str) -> list[str]:
    """The rows of a trainer's next batch."""
    settings = {"name": name, "batch_size": 2, "poll_interval_s": 0.02}
    lease = Claimer(ledger, TrainerConfig.model_validate(settings), StopRequest()).next()
    assert lease is not None
    return [row.msg_id for row in lease.rows]
