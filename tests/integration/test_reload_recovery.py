"""What an engine serves when something came in between: each ends in order by itself, and nothing serves unproven."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import update

from explorer_service.errors import NotOwner
from explorer_service.reload.judge import VersionJudge
from shared.errors import LedgerError, VersionMissing
from shared.experience import VersionState
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions, read_engine
from shared.ledger.tables import leases
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, served, wait_until, write_scripted_version

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.1}


@pytest.fixture
def database_url():
    """SQLite alone: nothing here depends on the database."""
    return


@pytest.fixture
def second_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


def states(explorer: RunningExplorer) -> dict[int, str]:
    with explorer.ledger.read() as connection:
        return {row.version: row.state for row in list_versions(connection)}


def shown(explorer: RunningExplorer) -> dict[str, object]:
    """Its engine, as it says to an admin."""
    engine: dict[str, object] = explorer.http.get("/status").json()["engines"][0]
    return engine


def announced(explorer: RunningExplorer) -> tuple[str, int | None]:
    with explorer.ledger.read() as connection:
        row = read_engine(connection, explorer.deps.leases.key(explorer.config.explorer.engines[0].url))
    assert row is not None
    return row.state, row.version


def reject(explorer: RunningExplorer, *versions: int) -> None:
    with explorer.ledger.write() as connection:
        for version in versions:
            assert transitions.reject_version(connection, version, "withdrawn", by="trainer")


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_others_serve_on_when_a_reload_was_announced_and_never_begun(scripted_engine, start_explorer, is_withdrawn):
    """The announcement is stored, and its answer comes too late."""
    both = [start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready() for _ in range(2)]
    publish(both[0], 0)
    publish(both[0], 1, -2.0)
    wait_until(lambda: all(served(explorer) == "1" for explorer in both))
    owner, other = sorted(both, key=lambda explorer: not shown(explorer)["owned"])
    ledger_leases, lost = owner.deps.leases, []
    announce = ledger_leases.announce

    async def announce_in_vain(url, state, version, **more):
        generation = await announce(url, state, version, **more)
        if state == "reloading" and not lost:
            lost.append(generation)
            if is_withdrawn:
                reject(owner, 2)
                await asyncio.sleep(0.2)  # it is not the newest any more
            raise LedgerError("the database has not answered in time")
        return generation

    ledger_leases.announce = announce_in_vain
    publish(both[0], 2, -3.0)
    wait_until(lambda: bool(lost))
    expected = 1 if is_withdrawn else 2
    wait_until(lambda: announced(owner) == ("serving", expected))
    wait_until(lambda: all(served(explorer) == str(expected) for explorer in (owner, other)))


def test_an_engine_is_not_opened_as_version_0_when_every_version_was_given_up(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    reject(explorer, 1, 0)
    wait_until(lambda: shown(explorer)["state"] == "checking")
    assert announced(explorer)[0] == "checking"
    explorer.stop()
    again = start_explorer([scripted_engine.url], reload=SETTINGS, engine_wait_s=1.0)
    wait_until(lambda: "none may serve" in str(shown(again)["reason"]))
    reply = again.chat()
    assert reply.status_code == 503 and "X-Flywheel-Version" not in reply.headers
    publish(again, 2, -3.0)
    wait_until(lambda: shown(again)["state"] == "serving")
    assert served(again) == "2"


def test_an_engine_serves_what_it_was_started_with_while_a_trainer_has_only_reserved_a_number(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    with explorer.ledger.write() as connection:
        assert transitions.reserve_version(connection, writer="t") == 0
    explorer.stop()
    assert served(start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()) == "0"


def take_the_turn(ledger: Ledger, owner: str | None, seconds: float = 5.0) -> None:
    with ledger.write() as connection:
        turn = update(leases).where(leases.c.name == "reload")
        connection.execute(turn.values(owner=owner, until=time.time() + seconds))


@pytest.fixture
def version_2(scripted_engine, second_engine, start_explorer) -> Iterator[Ledger]:
    """Version 2, published while no explorer runs. Two engines hold version 1, which has served; the ledger."""
    first = start_explorer([scripted_engine.url, second_engine.url], reload=SETTINGS).wait_ready()
    for version in (0, 1):
        publish(first, version, -1.0 - version)
        wait_until(lambda: [engine.version for engine in first.deps.pool.serving] == [version] * 2)  # noqa: B023
    first.stop()
    write_scripted_version(first.config.root, 2, -3.0)
    ledger = Ledger.open(first.config.ledger_url)
    with ledger.write() as connection:
        transitions.publish(connection, version=2, parent=1, kind="full", step=2)
    yield ledger
    ledger.close()


def test_an_engine_that_holds_the_last_good_version_serves_it_until_it_may_take_up_the_newest(
    version_2, scripted_engine, start_explorer
):
    take_the_turn(version_2, "ghost")
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS)
    assert served(explorer) == "1"
    take_the_turn(version_2, None)
    wait_until(lambda: served(explorer) == "2")


def test_of_two_engines_that_start_anew_with_a_newer_version_one_serves_at_any_time(
    version_2, scripted_engine, second_engine, start_explorer
):
    scripts = [scripted_engine.script, second_engine.script]
    for script in scripts:
        script.hung_loads = {"v000002"}
    explorer = start_explorer([scripted_engine.url, second_engine.url], reload=SETTINGS)
    wait_until(lambda: any("reload v000002" in script.calls for script in scripts))
    assert served(explorer) == "1"
    for script in scripts:
        script.hung_loads = set()
    wait_until(lambda: [engine.version for engine in explorer.deps.pool.serving] == [2, 2])


def test_a_proven_version_is_not_rejected_for_a_machine_that_does_not_see_its_folder(
    scripted_engine, second_engine, start_explorer, monkeypatch
):
    healthy = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(healthy, 0)
    wait_until(lambda: served(healthy) == "0")
    find, blind = VersionJudge._find, [True]

    def find_or_not(self, row, base):
        if blind and self._appear_s == 0.5 and row.version == 1:
            raise VersionMissing("v000001: cannot be read (Stale file handle)")
        return find(self, row, base)

    monkeypatch.setattr(VersionJudge, "_find", find_or_not)
    sick = start_explorer([second_engine.url], reload=SETTINGS | {"appear_s": 0.5}).wait_ready()
    wait_until(lambda: served(sick) == "0")
    publish(healthy, 1, -2.0)
    wait_until(lambda: served(healthy) == "1")
    wait_until(lambda: shown(sick)["state"] == "degraded")
    assert "Stale file handle" in str(shown(sick)["reason"])
    assert (served(sick), states(sick)[1]) == ("0", "SERVING")
    blind.clear()
    wait_until(lambda: served(sick) == "1" and shown(sick)["state"] == "serving")


def test_an_engine_whose_turn_another_one_got_is_not_paused_and_takes_the_version_up_later(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    ledger_leases, lost, calls = explorer.deps.leases, [], len(scripted_engine.script.calls)
    wait_followed = ledger_leases.wait_followed

    async def stand_still(url, generation, timeout_s):
        seeded = await wait_followed(url, generation, timeout_s)
        if not lost:
            lost.append(generation)
            take_the_turn(explorer.ledger, "ghost", 3.0)
        return seeded

    ledger_leases.wait_followed = stand_still
    publish(explorer, 1, -2.0)
    wait_until(lambda: bool(lost))
    wait_until(lambda: announced(explorer) == ("serving", 0))
    assert served(explorer) == "0" and scripted_engine.script.calls[calls:] == []
    take_the_turn(explorer.ledger, None)
    wait_until(lambda: served(explorer) == "1")


def test_a_withdrawn_version_does_not_serve_on_for_the_interval_between_two_reloads(scripted_engine, start_explorer):
    settings = SETTINGS | {"min_interval_s": 30.0}
    explorer = start_explorer([scripted_engine.url], reload=settings).wait_ready()
    scripted_engine.start_on(write_scripted_version(explorer.config.root, 0, -1.0))
    with explorer.ledger.write() as connection:  # it holds version 0 already, and is not reloaded for it
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    reject(explorer, 1)
    wait_until(lambda: served(explorer) == "0")


def test_versions_that_fail_one_after_the_other_pause_an_engine_no_more_often_than_good_ones(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"min_interval_s": 2.0}).wait_ready()
    script = scripted_engine.script
    publish(explorer, 0)
    wait_until(lambda: script.loaded == "v000000" and shown(explorer)["state"] == "serving")
    script.failed_loads = {"v000001", "v000002"}
    publish(explorer, 1, -2.0)
    wait_until(lambda: states(explorer)[1] == "REJECTED" and shown(explorer)["state"] == "serving")
    publish(explorer, 2, -3.0)
    time.sleep(0.5)  # long enough to load it
    publish(explorer, 3, -4.0)
    wait_until(lambda: served(explorer) == "3")
    assert "reload v000002" not in script.calls


def test_a_version_that_was_withdrawn_while_it_was_loaded_does_not_serve(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    named: list[str] = []
    script = scripted_engine.script
    script.hung_loads = {"v000001"}
    publish(explorer, 1, -2.0)
    wait_until(lambda: "reload v000001" in script.calls)
    reject(explorer, 1)
    script.hung_loads = set()
    wait_until(lambda: named.append(served(explorer)) or named[-1] == "0")
    assert set(named) == {"0"} and states(explorer)[1] == VersionState.REJECTED
    wait_until(lambda: announced(explorer) == ("serving", 0))


def test_an_engine_that_says_it_holds_other_weights_than_it_serves_gets_the_right_ones_back(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    scripted_engine._hold(explorer.config.root / "versions/v000000")  # as someone with the engine's token may do
    scripted_engine.script.label = "0:" + "0" * 16
    wait_until(lambda: scripted_engine.script.loaded == "v000001")
    wait_until(lambda: shown(explorer)["state"] == "serving")
    assert served(explorer) == "1"


def test_who_lost_an_engine_says_nothing_of_its_requests_when_it_has_the_engine_again(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    found = explorer.deps.leases
    found.note_spoiled(scripted_engine.url)
    with pytest.raises(NotOwner):
        found._lose(scripted_engine.url)
    publish(explorer, 1)
    wait_until(lambda: served(explorer) == "1")
    with explorer.ledger.read() as connection:
        row = read_engine(connection, found.key(scripted_engine.url))
    assert row is not None and row.spoiled == 0
