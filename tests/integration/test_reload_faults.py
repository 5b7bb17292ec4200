"""What goes wrong in a take-up, with two explorers on two engines and streams in flight: all ends in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from explorer_service.reload.controller import EngineController
from shared.ledger.tables import load_failures
from tests.support import take_up_faults
from tests.support.failing_ledger import failing_statements
from tests.support.forms import FULL
from tests.support.house import House, Streams
from tests.support.postgres import sqlite_alone
from tests.support.reloads import give_up_hung_loads
from tests.support.script import Script
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import publish, served, wait_until

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.05}
LONG = list(range(100, 140))
AT_MOST = None if FULL else 2  # statements of a take-up that fail

database_url = sqlite_alone  # nothing here depends on the database


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    both = [ScriptedEngine(), ScriptedEngine()]
    yield both
    for engine in both:
        engine.stop()


@pytest.fixture
def start_house(engines, start_explorer, monkeypatch) -> Callable[..., House]:
    give_up_hung_loads(monkeypatch, *engines)

    def start(explorers: int = 2, **reload: object) -> House:
        urls = [engine.url for engine in engines]
        started = [start_explorer(urls, reload=SETTINGS | reload, engine_wait_s=60.0) for _ in range(explorers)]
        house = House([explorer.wait_ready() for explorer in started], engines)
        for version in (0, 1):
            house.publish(version)
        house.all_serve(1)
        for engine in engines:
            engine.script.tells_weights, engine.script.reply_ids = True, LONG
            engine.script.logprobs = [-0.5] * len(LONG)
            engine.script.reload_s = 0.02  # labels are told apart by the middle of the load
            engine.script.starts_on = house.explorers[0].config.root / "versions" / "v000001"
        return house

    return start


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("streams", ["go_on", "finish"])
def test_streams_cross_a_good_reload_whole_and_name_both_versions(start_house, labels, streams):
    house = start_house(streams=streams, drain_s=0.2)
    for engine in house.engines:
        engine.script.keeps_labels = labels
    with Streams(house) as chats:
        house.publish(2)
        house.all_serve(2)
    assert len(chats.whole) == 8 and not chats.ended
    chats.check_labels()


FAULTS = {
    "load refused": ("failed_loads", "v000002", "REJECTED"),
    "wrong probe": ("wrong_probe_for", "v000002", "REJECTED"),
    "engine dies in the load": ("deadly_loads", "v000002", "FAILED"),
    "load hangs": ("hung_loads", "v000002", "FAILED"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_that_no_engine_takes_up_is_given_up_and_the_last_good_one_serves(start_house, fault):
    house = start_house()
    name, folder, state = FAULTS[fault]
    for engine in house.engines:
        getattr(engine.script, name).add(folder)
    with Streams(house) as chats:
        house.publish(2)
        wait_until(lambda: house.state(2) == state, 120)
    house.all_serve(1)
    assert house.row(2).reason and house.row(2).served_at is None
    chats.check_labels()
    if fault in ("load refused", "load hangs"):
        assert len(chats.whole) == 8, chats.ended
    if fault == "wrong probe":
        assert set(chats.ended.values()) == {"weights_unproven"}
    loads = house.loads(2)
    assert loads <= 2
    house.publish(3)
    house.all_serve(3)
    assert house.loads(2) == loads


def refuse_probe(script: Script, version: str, dying: list[Script] | None) -> None:
    """dying: the engine that dies of it, once one is asked; None: it stays healthy."""
    is_asked = script.loaded == version
    if is_asked and dying == []:
        dying.append(script)
    is_asked = is_asked and (dying is None or script is dying[0])
    script.refused = {"/v1/completions"} if is_asked else set()
    script.healthy = not (is_asked and dying)


@pytest.mark.parametrize("dies", [False, True])
def test_a_probe_that_a_healthy_engine_refuses_is_one_that_failed_and_else_the_engine_has_died(start_house, dies):
    house, dying = start_house(), [] if dies else None
    for engine in house.engines:
        engine.script.on_call["/v1/completions"] = partial(refuse_probe, engine.script, "v000002", dying)
    with Streams(house) as chats:
        house.publish(2)
        if dies:
            wait_until(lambda: bool(load_failures_of(house)))
            for engine in house.engines:
                engine.script.on_call = {}
                engine.script.refused, engine.script.healthy = set(), True
    house.all_serve(2 if dies else 1)
    assert house.state(2) == ("SERVING" if dies else "REJECTED")
    assert dies or (house.loads(2) == 1 and "is refused" in house.row(2).reason)
    assert set(chats.ended.values()) == {"weights_unproven"}
    chats.check_labels()


@pytest.mark.parametrize("path", take_up_faults.CALLS)
def test_an_engine_that_is_killed_once_in_a_take_up_comes_back_and_takes_it_up(start_house, path):
    take_up_faults.kill_engine(start_house(), path)


def test_a_fault_of_a_folder_reaches_neither_an_engine_nor_a_stream(start_house):
    take_up_faults.give_up_folders(start_house(), 1)


def test_a_folder_that_shows_late_is_taken_up_then(start_house, tmp_path):
    take_up_faults.wait_for_folder(start_house(), 1, tmp_path / "late")


def test_engines_whose_disk_is_full_serve_on_and_stage_the_version_when_there_is_room(start_house, monkeypatch):
    take_up_faults.fill_staging_disk(start_house(), 1, monkeypatch)


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "wrong probe"])
def test_the_ledger_fails_at_any_statement_and_all_ends_in_order(start_house, is_good):
    house = start_house()
    with failing_statements() as ledger:
        take_up_faults.take_up(house, 1, is_good)
        statements = list(ledger.met)
        for statement in statements[:: 1 if AT_MOST is None else len(statements) // AT_MOST]:
            ledger.arm(1, statement)
            take_up_faults.take_up(house, 1, is_good)
            assert ledger.refused == statement
    assert len(statements) >= 8


@pytest.mark.parametrize("name", ["failed_loads", "wrong_probe_for", "hung_loads"])
def test_a_version_that_one_engine_has_proven_is_not_condemned_for_another(start_house, name):
    house = start_house(explorers=1)
    (explorer,), (healthy, sick) = house.explorers, house.engines

    def states() -> list[str]:
        return [engine["state"] for engine in explorer.http.get("/status").json()["engines"]]

    sick.script.healthy = False
    wait_until(lambda: states() == ["serving", "unavailable"])
    house.publish(2)
    wait_until(lambda: house.state(2) == "SERVING" and healthy.script.loaded == "v000002")
    getattr(sick.script, name).add("v000002")
    sick.script.healthy = True
    wait_until(lambda: states() == ["serving", "degraded"])
    wait_until(lambda: explorer.http.get("/ready").json() == {"status": "ready", "degraded": 1})  # between two tries
    assert explorer.chat().status_code == 200
    tries = house.loads(2)
    wait_until(lambda: house.loads(2) > tries)
    assert house.state(2) == "SERVING"
    getattr(sick.script, name).clear()
    house.all_serve(2)


def test_an_engine_that_cannot_get_the_last_good_version_back_is_started_anew(start_house):
    house = start_house(explorers=1)
    sick = house.engines[0].script
    sick.failed_loads = {"v000001", "v000002"}
    house.publish(2)
    wait_until(lambda: "/flywheel/restart" in sick.calls)
    sick.failed_loads = set()
    house.all_serve(2)


def test_an_engine_that_holds_another_version_than_the_newest_is_not_taken_for_it(start_house, start_explorer):
    house = start_house(explorers=1)
    house.publish(2)
    house.all_serve(2)
    house.explorers[0].stop()
    script = house.engines[0].script
    house.engines[0]._hold(script.starts_on)  # neighbours compute nearly the same: its probe passes as version 2's
    script.label = "1:" + "0" * 16
    for engine in house.engines:
        engine.script.calls.clear()
    again = start_explorer([engine.url for engine in house.engines], reload=SETTINGS).wait_ready()
    house.explorers[0] = again
    house.all_serve(2)
    assert [engine.script.calls.count("reload v000002") for engine in house.engines] == [1, 0]


def test_one_engine_at_a_time_reloads_for_all_explorers(start_house, engines, start_explorer):
    house = start_house()
    for engine in engines:
        engine.script.reload_s, engine.script.reloads = 0.3, []
    house.publish(2)
    house.all_serve(2)
    one, other = sorted(reload for engine in engines for reload in engine.script.reloads)
    assert one[1] <= other[0], "both reloaded at once"


def test_an_explorer_with_other_engines_is_not_waited_for(scripted_engine, start_explorer, engines):
    first = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    stranger = start_explorer([engines[0].url], reload=SETTINGS | {"poll_interval_s": 30.0}).wait_ready()
    wait_until(lambda: not first.deps.membership.is_alone)
    seen = []
    leases = first.deps.leases
    wait_followed = leases.wait_followed

    async def asked(url: str, generation: int, timeout_s: float) -> int:
        seen.append(await leases.read_followed(url))
        return await wait_followed(url, generation, 0.0)

    leases.wait_followed = asked
    publish(first, 0)
    wait_until(lambda: "reload v000000" in scripted_engine.script.calls)
    assert seen and not any(seen)
    assert stranger.chat().status_code == 200


def test_a_load_failure_is_written_down_with_its_engine(start_house):
    house = start_house(explorers=1)
    house.engines[0].script.deadly.add("/collective_rpc")
    house.publish(2)
    house.all_serve(2)
    (row,) = load_failures_of(house)
    assert row.version == 2 and house.engines[0].url in row.engine


def load_failures_of(house: House):
    with house.ledger.read() as connection:
        return connection.execute(select(load_failures.c.version, load_failures.c.engine)).all()


def test_an_overtaken_version_is_not_loaded(scripted_engine, start_explorer, monkeypatch):
    clock, bring_in, seen = [time.monotonic()], EngineController._bring_in, set()

    async def bring_in_seen(controller, newest):
        seen.add(newest.version)
        await bring_in(controller, newest)

    monkeypatch.setattr(EngineController, "_bring_in", bring_in_seen)
    monkeypatch.setattr("explorer_service.reload.controller.time", SimpleNamespace(monotonic=lambda: clock[0]))
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS | {"min_interval_s": 1.0}).wait_ready()
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    for version in (2, 3, 4):
        publish(explorer, version, -1.0 - version)
    wait_until(lambda: 4 in seen)
    assert served(explorer) == "1"
    clock[0] += 1.0
    wait_until(lambda: served(explorer) == "4")
    assert not {"reload v000002", "reload v000003"} & set(scripted_engine.script.calls)


def test_a_new_chat_does_not_wait_for_long_streams_when_they_go_on(scripted_engine, start_explorer):
    explorer = start_explorer(
        [scripted_engine.url], reload=SETTINGS | {"drain_s": 60.0}, engine_wait_s=30.0
    ).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    script, gate = scripted_engine.script, threading.Event()
    script.reply_ids, script.logprobs, script.streams_wait = LONG, [-0.5] * len(LONG), True

    def stream() -> None:
        with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
            for _ in reply.iter_lines():
                gate.set()

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert gate.wait(240)
    publish(explorer, 1, -1.5)
    wait_until(lambda: served(explorer) == "1")
    assert streaming.is_alive(), "the chat has waited for the stream"
    script.streams_wait = False
    streaming.join()
