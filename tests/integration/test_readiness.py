"""GET /ready during take-ups: 200 as long as a chat would be answered, even if it has to wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import publish, served, wait_until

pytestmark = pytest.mark.usefixtures("patient_health")


def take_up(explorer, engine):
    """Let the engine begin a load that does not end."""
    publish(explorer, 0)
    wait_until(lambda: served(explorer) == "0")
    engine.script.hung_loads = {"v000001"}
    publish(explorer, 1, -1.5)
    wait_until(lambda: "reload v000001" in engine.script.calls)


def test_an_explorer_whose_only_engine_takes_up_a_version_is_ready_because_chats_wait(explorer, scripted_engine):
    take_up(explorer, scripted_engine)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(explorer.chat)
        wait_until(lambda: explorer.deps.pool.waiting == 1)
        ready = explorer.http.get("/ready")
        scripted_engine.script.hung_loads = set()
        assert waiting.result().headers["X-Flywheel-Version"] == "1"
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


def test_an_explorer_is_not_ready_once_a_take_up_has_lasted_longer_than_chats_wait(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], engine_wait_s=0.5).wait_ready()
    take_up(explorer, scripted_engine)
    wait_until(lambda: explorer.http.get("/ready").status_code == 503)
    assert explorer.chat().json()["error"]["code"] == "engines_busy"
    scripted_engine.script.hung_loads = set()
    wait_until(lambda: explorer.http.get("/ready").status_code == 200)
    assert served(explorer) == "1"
