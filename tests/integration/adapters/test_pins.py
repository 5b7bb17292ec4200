"""Versions that callers name: loaded on demand, kept for a while after their last use, left alone where they hurt."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from sqlalchemy import delete, select

from explorer_service.reload import adapter_controller
from explorer_service.reload.blame import Backoff
from shared.experience import Purpose
from shared.ledger import queries, transitions
from shared.ledger.tables import load_failures, version_leases
from tests.support.adapters import (
    engine,
    limit_hung_loads,
    observed,
    publish_and_wait,
    restart_when_noticed,
    said,
    state,
    watch_openings,
)
from tests.support.scripted_adapters import name_of, publish_adapter
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, served, wait_until


def held(scripted_engine: ScriptedEngine) -> list[str]:
    """The adapters that the engine has, without their digests."""
    return [name.partition("+")[0] for name in scripted_engine.script.adapters]


def pinned(explorer: RunningExplorer) -> list[int]:
    with explorer.ledger.read() as connection:
        return queries.pinned_versions(connection)


def count(explorer: RunningExplorer, result: str) -> float:
    """How many pinned versions were brought to engines with this result, as /metrics has it (renewed each second)."""
    shown = f'flywheel_traffic_pins_total{{result="{result}"}} '
    lines = explorer.http.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(shown)) for line in lines if line.startswith(shown))


def test_a_pinned_version_that_is_on_disk_is_loaded_on_demand(explorer, scripted_engine):
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: len(scripted_engine.script.adapters) == 1)
    assert said(explorer.chat(model="agent@1")) == "v000001"
    assert said(explorer.chat()) == "v000002"
    assert state(explorer, 1) == "RETIRED"
    wait_until(lambda: count(explorer, "served") == 1)


def test_the_pin_that_was_used_least_recently_goes_first(start, scripted_engine):
    explorer = start(room=2)
    explorer.deps.dispatcher._pin.__self__._tick_s = 0.5  # how soon a use renews a pin
    publish_and_wait(explorer, 1, 2, 3, 4)

    def used_last() -> int:
        with explorer.ledger.read() as connection:
            return queries.pinned_versions(connection)[0]

    for version in (1, 2):
        assert said(explorer.chat(model=f"agent@{version}")) == f"v{version:06d}"
    assert used_last() == 2
    wait_until(lambda: said(explorer.chat(model="agent@1")) == "v000001" and used_last() == 1)
    assert said(explorer.chat(model="agent@3")) == "v000003"
    wait_until(lambda: set(held(scripted_engine)) == {"agent@1", "agent@3", "agent@4"})


def test_a_pin_that_is_used_just_before_its_end_lasts_as_long_again(start):
    explorer = start(unpin_after_s=4.0)
    publish_and_wait(explorer, 1, 2)

    def ends_at() -> float:
        with explorer.ledger.read() as connection:
            pin = select(version_leases.c.until).where(version_leases.c.purpose == Purpose.PINNED)
            return float(connection.execute(pin).scalar() or 0.0)

    assert explorer.chat(model="agent@1").status_code == 200
    wait_until(lambda: ends_at() < time.time() + 0.5)
    used_at = time.time()
    assert explorer.chat(model="agent@1").status_code == 200
    assert ends_at() > used_at + 3.0


def test_a_version_that_is_not_on_disk_any_more_is_a_404_that_names_those_that_are(explorer):
    publish_and_wait(explorer, 1, 2)
    with explorer.ledger.write() as connection:
        connection.exec_driver_sql("UPDATE versions SET deleted_at = 1.0 WHERE version = 1")
    reply = explorer.chat(model="agent@1")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "version 1 is not on disk any more; on disk: [0, 2]"
    assert explorer.chat(model="agent@7").json()["error"]["message"].startswith("version 7 does not exist")
    with explorer.ledger.write() as connection:
        assert transitions.reserve_version(connection, writer="trainer") == 3
    assert explorer.chat(model="agent@3").json()["error"]["message"].startswith("version 3 is not published yet")


def test_why_a_pinned_version_is_not_in_service_names_no_address(explorer, scripted_engine):
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    scripted_engine.script.refused.add("/v1/load_lora_adapter")
    reply = explorer.chat(model="agent@1")
    assert reply.status_code == 404
    assert "version 1 is not in service (engine (its address) /v1/load" in reply.json()["error"]["message"]
    assert scripted_engine.url not in reply.text and scripted_engine.url in engine(explorer).refused[1]


def test_a_pin_that_nobody_uses_any_more_leaves_the_engine_and_keeps_no_files(start, scripted_engine):
    explorer = start(unpin_after_s=0.2)
    publish_and_wait(explorer, 1, 2)
    assert explorer.chat(model="agent@1").status_code == 200
    wait_until(lambda: held(scripted_engine) == ["agent@2"] and pinned(explorer) == [])


def test_a_request_that_waits_for_a_version_is_a_use_of_its_pin(start, scripted_engine):
    explorer, script = start(unpin_after_s=1.0), scripted_engine.script
    publish_and_wait(explorer, 1)
    unloading, path = threading.Event(), "/v1/unload_lora_adapter"
    script.on_call[path] = unloading.set
    script.hung.add(path)
    publish_adapter(explorer, 2)
    assert unloading.wait(60)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(explorer.chat, model="agent@1")
        wait_until(lambda: explorer.deps.pool.waiting == 1)
        time.sleep(1.5)  # longer than a pin without a use lasts
        script.hung.clear()
        assert said(reply.result()) == "v000001"


def test_a_pin_that_has_ended_is_not_renewed_for_a_use_before_its_end(start, scripted_engine):
    explorer, script = start(unpin_after_s=8.0), scripted_engine.script
    publish_and_wait(explorer, 1, 2)
    assert explorer.chat(model="agent@1").status_code == 200
    with explorer.ledger.write() as connection:
        connection.execute(delete(version_leases).where(version_leases.c.purpose == Purpose.PINNED))
    loads = script.calls.count(f"load {name_of(explorer, 1)}")
    wait_until(lambda: held(scripted_engine) == ["agent@2"] and not explorer.deps.pool.pinned)
    assert script.calls.count(f"load {name_of(explorer, 1)}") == loads
    assert said(explorer.chat(model="agent@1")) == "v000001"


def test_a_version_with_a_request_in_flight_is_not_unloaded(start, scripted_engine):
    explorer = start(unpin_after_s=0.2)
    scripted_engine.script.streams_wait = True
    publish_and_wait(explorer, 1)
    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        publish_and_wait(explorer, 2, 3)
        wait_until(lambda: "agent@2" not in held(scripted_engine))
        assert set(held(scripted_engine)) == {"agent@1", "agent@3"}
        scripted_engine.script.streams_wait = False
        assert reply.read().endswith(b"data: [DONE]\n\n")
    wait_until(lambda: held(scripted_engine) == ["agent@3"])


# ------------------------------------------------------------------ pins that an engine does not bear


def publish_unserved(explorer: RunningExplorer, scripted_engine: ScriptedEngine) -> None:
    """Versions 1 and 2, of which only 2 was ever in an engine."""
    scripted_engine.script.healthy = False
    wait_until(lambda: not engine(explorer).is_open)
    publish_adapter(explorer, 2)
    publish_adapter(explorer, 1)  # afterwards: never is it the newest that is known
    scripted_engine.script.healthy = True
    wait_until(lambda: state(explorer, 2) == "SERVING" and engine(explorer).is_open)


def test_a_pinned_version_that_takes_too_long_once_is_counted_and_the_second_time_failed(
    start, scripted_engine, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(adapter_controller, "Backoff", partial(Backoff, clock=lambda: now))
    explorer, script = start(retry_s=60.0), scripted_engine.script
    limit_hung_loads(explorer, script)
    publish_unserved(explorer, scripted_engine)
    script.hung = {"/v1/load_lora_adapter"}
    reply = explorer.chat(model="agent@1")
    assert (reply.status_code, "has not answered within 0.3 s" in reply.text) == (404, True)
    assert state(explorer, 1) == "SKIPPED"
    now += 61.0
    wait_until(lambda: state(explorer, 1) == "FAILED")
    wait_until(lambda: count(explorer, "failed") == 2)
    script.hung = set()
    assert (served(explorer), said(explorer.chat())) == ("2", "v000002")


@pytest.mark.parametrize("last_word", [asyncio.CancelledError, RuntimeError], ids=["it breaks off", "it answers 500"])
def test_a_pinned_version_that_ends_the_engine_twice_is_left_alone_and_the_engine_serves_the_rest(
    start, scripted_engine, last_word, monkeypatch
):
    monkeypatch.setattr(adapter_controller, "_DEADLY", 6000)  # no third load as long as the test takes
    explorer, script = start(), scripted_engine.script
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    deadly = f"loading {name_of(explorer, 1)}"

    def die(said: str) -> None:
        if said == deadly:
            scripted_engine.die()
            raise last_word

    script.say, script.dead_s = die, 600.0
    restart_when_noticed(explorer, scripted_engine)
    opened_with = watch_openings(explorer)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(explorer.chat, model="agent@1").result()
    assert (reply.status_code, "version 1 is not in service" in reply.text) == (404, True)
    wait_until(lambda: len(opened_with) == 2 and engine(explorer).is_open)
    assert opened_with == [{0, 2}, {0, 2}]
    assert said(explorer.chat()) == "v000002"
    assert state(explorer, 1) == "RETIRED"  # it was proven before
    with explorer.ledger.read() as connection:
        assert connection.execute(select(load_failures.c.version)).scalars().all() == [1, 1]


def test_a_pin_that_ended_the_engine_once_is_tried_again_when_the_engine_is_open(start, scripted_engine):
    explorer, script = start(), scripted_engine.script
    publish_and_wait(explorer, 1, 2)
    wait_until(lambda: held(scripted_engine) == ["agent@2"])
    script.deadly = {"/v1/load_lora_adapter"}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(explorer.chat, model="agent@1").result()
    wait_until(lambda: 1 in engine(explorer).versions)
    assert (script.deaths, said(explorer.chat(model="agent@1"))) == (1, "v000001")


def test_a_busy_pin_that_makes_room_takes_no_other_pin_s_place(start, scripted_engine):
    explorer = start(room=2)
    publish_and_wait(explorer, 1, 2, 3)
    for pin in (1, 2):
        said(explorer.chat(model=f"agent@{pin}"))
    scripted_engine.script.streams_wait = True
    with ExitStack() as streams, observed(explorer) as rounds:
        for model in ("agent@1", "agent@2", "agent"):
            asked = {"messages": [], "stream": True, "model": model}
            streams.enter_context(explorer.http.stream("POST", "/chat", json=asked))
        publish_and_wait(explorer, 4)
        rounds.clear()
        wait_until(lambda: len(rounds) > 4)
        assert all(2 in versions for versions in rounds)
        scripted_engine.script.streams_wait = False
