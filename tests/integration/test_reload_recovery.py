"""What came in between heals by itself: a lost turn, an answer that comes too late, weights of somebody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from explorer_service.errors import NotOwner
from shared.errors import LedgerError
from shared.experience import VersionState
from shared.ledger import transitions
from shared.ledger.queries import read_engine
from shared.versions import version_path
from tests.support.heartbeats import frequent_heartbeats  # noqa: F401 — a fixture
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, announced, give_up_hung_loads, reject, shown, states, take_the_turn
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, served, wait_joined, wait_until

database_url = sqlite_alone  # nothing here depends on the database


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


def test_an_engine_whose_turn_another_one_got_is_not_paused_and_takes_the_version_up_later(
    scripted_engine, start_explorer, monkeypatch
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    ledger_leases, lost, calls = explorer.deps.leases, [], len(scripted_engine.script.calls)
    wait_followed, acquire = ledger_leases.wait_followed, transitions.acquire_lease
    is_free = threading.Event()  # otherwise the ghost renews its lease
    is_free.set()
    monkeypatch.setattr(transitions, "acquire_lease", lambda *args, **more: is_free.is_set() and acquire(*args, **more))

    async def stand_still(url, generation, timeout_s):
        seeded = await wait_followed(url, generation, timeout_s)
        if not lost:
            lost.append(generation)
            is_free.clear()
            take_the_turn(explorer.ledger, "ghost")
        return seeded

    ledger_leases.wait_followed = stand_still
    publish(explorer, 1, -2.0)
    wait_until(lambda: bool(lost))
    wait_until(lambda: announced(explorer) == ("serving", 0))
    assert served(explorer) == "0" and scripted_engine.script.calls[calls:] == []
    take_the_turn(explorer.ledger, None)
    is_free.set()
    wait_until(lambda: served(explorer) == "1")


def test_a_version_that_another_explorer_has_just_rejected_is_not_loaded(scripted_engine, start_explorer, monkeypatch):
    """It had the turn before, and its engine refused the version. This explorer has not polled since."""
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    publish(explorer, 0)
    publish(explorer, 1, -2.0)
    wait_until(lambda: served(explorer) == "1")
    steps, acquire, release = [], transitions.acquire_lease, transitions.release_lease
    script.on_call["/flywheel/stage"] = lambda: steps.append("staged")

    def acquire_noted(connection, name, owner):
        if is_acquired := acquire(connection, name=name, owner=owner):
            steps.append("acquired")
        return is_acquired

    def release_noted(connection, name, owner):
        release(connection, name, owner)
        steps.append("released")

    def until_next_poll(interval_s):
        steps.append("polled")
        return 600.0

    monkeypatch.setattr("shared.ledger.transitions.leases.LEASE_S", 3600.0)
    monkeypatch.setattr(transitions, "acquire_lease", acquire_noted)
    monkeypatch.setattr(transitions, "release_lease", release_noted)
    take_the_turn(explorer.ledger, "another", 1800.0)
    publish(explorer, 2, -3.0)
    wait_until(lambda: "staged" in steps)
    monkeypatch.setattr("explorer_service.reload.poller.until_next_tick", until_next_poll)
    wait_until(lambda: "polled" in steps)
    reject(explorer, 2)
    take_the_turn(explorer.ledger, None)
    wait_until(lambda: "acquired" in steps and "released" in steps[steps.index("acquired") :])
    assert "reload v000002" not in script.calls
    assert served(explorer) == "1"


def test_a_version_that_was_withdrawn_while_it_was_loaded_does_not_serve(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS, engine_wait_s=60.0).wait_ready()
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


def test_a_version_that_an_operator_lets_engines_try_again_is_tried_at_once(
    scripted_engine, start_explorer, monkeypatch
):
    give_up_hung_loads(monkeypatch, scripted_engine)
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"retry_s": 600.0}).wait_ready()
    script = scripted_engine.script
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING")
    script.hung_loads = {"v000001"}
    with explorer.ledger.write() as connection:  # the second time it is given up
        transitions.count_load_failure(connection, 1, "another engine", "it hung")
    publish(explorer, 1, -2.0)
    wait_until(lambda: states(explorer)[1] == "FAILED" and shown(explorer)["state"] == "serving")
    script.hung_loads = set()
    with explorer.ledger.write() as connection:
        assert transitions.retry_version(connection, 1, by="operator")
    wait_until(lambda: served(explorer) == "1")


@pytest.mark.usefixtures("frequent_heartbeats")
@pytest.mark.parametrize("is_seeded_at", ["owner", "follower", "neither"])
def test_an_engine_with_seeded_requests_of_any_explorer_finishes_them_before_it_pauses(
    scripted_engine, start_explorer, is_seeded_at
):
    both = [start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready() for _ in range(2)]
    publish(both[0], 0)
    wait_until(lambda: states(both[0])[0] == "SERVING")
    wait_joined(both)
    owner, other = sorted(both, key=lambda explorer: not shown(explorer)["owned"])
    script = scripted_engine.script
    script.pause_modes.clear()
    script.chats_wait, asked = True, {"owner": owner, "follower": other, "neither": owner}[is_seeded_at]
    more = {} if is_seeded_at == "neither" else {"seed": 7}
    chat = threading.Thread(target=asked.chat, kwargs=more)
    chat.start()
    wait_until(lambda: asked.deps.pool.engines[0].in_flight > 0)
    publish(both[0], 1, -2.0)
    wait_until(lambda: bool(script.pause_modes))
    script.chats_wait = False
    chat.join()
    assert script.pause_modes == ["keep" if is_seeded_at == "neither" else "wait"]


def start_on_0(explorer: RunningExplorer, engine: ScriptedEngine) -> None:
    """Publish version 0, on which the engine starts from now on, and wait until it serves."""
    publish(explorer, 0)
    engine.start_on(explorer.config.root / version_path(0))
    wait_until(lambda: states(explorer)[0] == "SERVING")


def _load_wrongly(script):
    """What is loaded into the running engine is computed wrongly, what it is started on is not."""
    wrong = script.wrong_probe_for
    script.on_call["/collective_rpc"] = lambda: wrong.update(f"v{version:06d}" for version in range(5))
    script.on_call["/flywheel/restart"] = wrong.clear


def test_an_engine_whose_loads_are_wrong_is_restarted_and_serves_the_last_good_version(scripted_engine, start_explorer):
    settings = {**SETTINGS, "retry_s": 1.0}
    explorer, script = start_explorer([scripted_engine.url], reload=settings).wait_ready(), scripted_engine.script
    start_on_0(explorer, scripted_engine)
    _load_wrongly(script)
    publish(explorer, 1, -2.0)
    wait_until(lambda: script.deaths == 1 and served(explorer) == "0")
    assert states(explorer)[1] == "PUBLISHED", "the version is not to blame: another engine may prove it"
    assert shown(explorer)["state"] == "degraded" and "its loads are wrong" in shown(explorer)["reason"]
    publish(explorer, 2, -3.0)
    wait_until(lambda: script.deaths == 2 and served(explorer) == "0")
    _, (_, last_ended), (next_began, _), _ = script.reloads
    assert next_began - last_ended >= 1.0, "also a later version waits"
    script.on_call.clear()
    script.wrong_probe_for.clear()
    wait_until(lambda: served(explorer) == "2" and shown(explorer)["state"] == "serving")


def test_an_engine_whose_loads_are_wrong_and_that_nobody_can_restart_is_closed(scripted_engine, start_explorer):
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    start_on_0(explorer, scripted_engine)
    _load_wrongly(script)
    del script.on_call["/flywheel/restart"]
    script.refused.add("/flywheel/restart")
    publish(explorer, 1, -2.0)
    wait_until(lambda: f"restart engine {scripted_engine.url}" in shown(explorer)["reason"])
    assert shown(explorer)["state"] == "checking"
    script.wrong_probe_for.clear()
    scripted_engine.die()
    wait_until(lambda: served(explorer) == "0")


def test_an_engine_that_proves_nothing_after_a_restart_either_is_not_restarted_again(scripted_engine, start_explorer):
    """It computes otherwise than the trainer, whatever it is started on."""
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    script.wrong_probe_for.add("v000000")
    publish(explorer, 0)
    scripted_engine.start_on(explorer.config.root / version_path(0))
    wait_until(lambda: len(script.reloads) >= 4)
    wait_until(lambda: "if that does not help" in shown(explorer)["reason"])
    assert script.deaths == 1
    script.wrong_probe_for.clear()
    wait_until(lambda: served(explorer) == "0")


def test_no_version_is_given_up_for_engines_that_refuse_every_load(scripted_engine, start_explorer):
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    start_on_0(explorer, scripted_engine)
    script.failed_loads = {"v000000", "v000001"}
    publish(explorer, 1, -2.0)
    wait_until(lambda: script.deaths == 2 and served(explorer) == "0")
    assert states(explorer)[1] == "PUBLISHED"
    assert shown(explorer)["state"] == "degraded" and "cannot be loaded again" in shown(explorer)["reason"]
    script.failed_loads = set()
    wait_until(lambda: served(explorer) == "1" and shown(explorer)["state"] == "serving")


def test_a_version_that_ends_an_engine_whose_server_answers_on_counts_as_a_death(scripted_engine, start_explorer):
    """That server refuses all loads, also of the last good version."""
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    start_on_0(explorer, scripted_engine)
    script.failed_loads = {"v000000", "v000001"}
    script.on_call["/collective_rpc"] = lambda: setattr(script, "healthy", False)
    before = len(script.reloads)
    publish(explorer, 1, -2.0)
    for loads in (2, 4):
        wait_until(lambda loads=loads: len(script.reloads) == before + loads)
        wait_until(lambda: shown(explorer)["state"] == "unavailable")
        scripted_engine.die()
        script.healthy = True
    wait_until(lambda: served(explorer) == "0")
    assert states(explorer)[1] == "FAILED"
