"""Take-ups by one explorer, or with settings of their own, on two engines that have faults: all ends in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from explorer_service.reload.controller import EngineController
from shared.ledger.tables import load_failures
from tests.support.forms import FULL
from tests.support.house import LONG, House, Streams
from tests.support.postgres import sqlite_alone
from tests.support.reloads import give_up_hung_loads
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import publish, served, wait_until

SETTINGS = {"poll_interval_s": 0.02, "drain_s": 1.0, "retry_s": 0.05}

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

    def start(explorers: int = 1, **reload: object) -> House:
        urls = [engine.url for engine in engines]
        started = [start_explorer(urls, reload=SETTINGS | reload, engine_wait_s=60.0) for _ in range(explorers)]
        return House([explorer.wait_ready() for explorer in started], engines).begin()

    return start


ALL = [("go_on", True), ("go_on", False), ("finish", True), ("finish", False)]


@pytest.mark.parametrize(("streams", "labels"), ALL if FULL else [ALL[0], ALL[-1]])
def test_streams_cross_a_good_reload_whole_and_name_both_versions(start_house, streams, labels):
    house = start_house(explorers=2, streams=streams, drain_s=0.2)
    for engine in house.engines:
        engine.script.keeps_labels = labels
    with Streams(house) as chats:
        house.publish(2)
        house.all_serve(2)
    assert len(chats.whole) == 8 and not chats.ended
    chats.check_labels()


@pytest.mark.parametrize("name", ["failed_loads", "wrong_probe_for", "hung_loads"])
def test_a_version_that_one_engine_has_proven_is_not_condemned_for_another(start_house, name):
    house = start_house()
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
    house = start_house()
    sick = house.engines[0].script
    sick.failed_loads = {"v000001", "v000002"}
    house.publish(2)
    wait_until(lambda: "/flywheel/restart" in sick.calls)
    sick.failed_loads = set()
    house.all_serve(2)


def test_an_engine_that_holds_another_version_than_the_newest_is_not_taken_for_it(start_house, start_explorer):
    house = start_house()
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
    house = start_house()
    house.engines[0].script.deadly.add("/collective_rpc")
    house.publish(2)
    house.all_serve(2)
    with house.ledger.read() as connection:
        (row,) = connection.execute(select(load_failures.c.version, load_failures.c.engine))
    assert row.version == 2 and house.engines[0].url in row.engine


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
