"""An engine serves while it waits for its turn, or for a version's files, and is checked meanwhile."""

from __future__ import annotations

import threading

import pytest

from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, publish, served, wait_until

database_url = sqlite_alone  # nothing here depends on the database


def test_an_engine_that_broke_a_chat_off_serves_again_while_it_waits_for_its_turn(
    scripted_engine, second_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url, second_engine.url], reload=SETTINGS, engine_wait_s=5.0)
    publish(explorer, 0)
    scripts = [scripted_engine.script, second_engine.script]
    wait_until(lambda: all(script.label.startswith("0:") for script in scripts))
    wait_until(lambda: len(explorer.deps.pool.serving) == 2)
    for script in scripts:
        script.hung_loads = {"v000001"}
    publish(explorer, 1, -2.0)
    wait_until(lambda: any("reload v000001" in script.calls for script in scripts))
    waiting = next(script for script in scripts if "reload v000001" not in script.calls)
    waiting.die_on_chat = True
    assert explorer.chat().status_code == 503
    waiting.die_on_chat = False
    wait_until(lambda: explorer.http.get("/ready").status_code == 200)
    assert served(explorer) == "0"
    for script in scripts:
        script.hung_loads = set()
    wait_until(lambda: [engine.version for engine in explorer.deps.pool.serving] == [1, 1])


class Pair:
    """Two engines that serve version 1. One of them loads version 2, and the other one waits for its turn."""

    def __init__(self, explorer: RunningExplorer, engines: list[ScriptedEngine]) -> None:
        self.explorer, self._engines = explorer, engines
        for version in (0, 1):
            publish(explorer, version, -1.0 - version)
            self.wait_served(version)
        for engine in engines:
            engine.script.hung_loads = {"v000002"}
        publish(explorer, 2, -3.0)
        wait_until(lambda: any("reload v000002" in engine.script.calls for engine in engines))
        place = next(n for n, engine in enumerate(engines) if "reload v000002" not in engine.script.calls)
        self.waiting, self.shown = engines[place], explorer.deps.pool.engines[place]

    def wait_served(self, version: int) -> None:
        wait_until(lambda: [engine.version for engine in self.explorer.deps.pool.serving] == [version] * 2)

    def go_on(self) -> None:
        assert "reload v000002" not in self.waiting.script.calls, "it still waits"
        for engine in self._engines:
            engine.script.hung_loads = set()
        self.wait_served(2)


@pytest.fixture
def pair(scripted_engine, second_engine, start_explorer) -> Pair:
    engines = [scripted_engine, second_engine]
    return Pair(start_explorer([engine.url for engine in engines], reload=SETTINGS), engines)


def test_an_engine_that_restarts_on_another_version_while_it_waits_for_its_turn_gets_no_chats(pair):
    """No chat meets the restart: the engine is idle."""
    pair.waiting.script.starts_on = pair.explorer.config.root / "versions/v000000"
    pair.waiting.die()
    wait_until(lambda: pair.waiting.script.label.startswith("0:"))
    wait_until(lambda: not pair.shown.is_open)
    pair.go_on()


def test_streams_end_when_their_engine_gets_other_weights_while_it_waits_for_its_turn(pair):
    pair.waiting.script.streams_wait = True
    with pair.explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        pair.waiting.script.label = "0:" + "0" * 16  # as someone with the engine's token may do
        wait_until(lambda: not pair.shown.is_open)
        pair.waiting.script.streams_wait = False
        assert "weights_unproven" in list(lines)[-1]
    pair.go_on()


def test_an_engine_that_ends_without_a_chat_while_a_version_is_staged_is_not_counted_as_ready(
    scripted_engine, start_explorer
):
    explorer, script = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready(), scripted_engine.script
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    script.hung.add("/flywheel/stage")
    staged = threading.Event()
    script.on_call["/flywheel/stage"] = staged.set
    publish(explorer, 1, -2.0)
    assert staged.wait(240)
    script.healthy = False
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    script.healthy = True
    script.hung.clear()
    wait_until(lambda: served(explorer) == "1")
