"""Chats that wait for a take-up are sent to the engine while it proves the version, and answered once it has."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from typing import Any

import pytest
from sqlalchemy import select

from explorer_service.engines.dispatch import Dispatcher, EngineRequest
from explorer_service.engines.pool import EnginePool
from explorer_service.errors import EngineUnavailable, NoEngine, WeightsUnproven
from explorer_service.metrics import ExplorerMetrics
from shared.config import EngineAddress
from shared.experience import Sampling
from shared.ledger.tables import experiences
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, reject, shown, states
from tests.support.script import Hold
from tests.support.servers import publish, wait_until

pytestmark = pytest.mark.usefixtures("patient_health")
database_url = sqlite_alone  # nothing here depends on the database
CHATS, PROBES = "/v1/chat/completions", "/v1/completions"


class Asked(threading.Thread):
    """A caller of one chat."""

    def __init__(self, explorer, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self._explorer, self._stream = explorer, stream
        self.status, self.version, self.text = 0, "", ""
        self.start()

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": "q"}], "stream": self._stream}
        reply = self._explorer.http.post("/chat", json=body, timeout=240)
        self.text, self.version = reply.text, reply.headers.get("X-Flywheel-Version", "")
        self.status = reply.status_code


@pytest.fixture
def waiting(scripted_engine, start_explorer):
    """Return a function: an explorer, a chat that waits for the take-up of version 1, and its probe, which is held."""
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS, engine_wait_s=60.0).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING" and shown(explorer)["state"] == "serving")
    script, pause, probe = scripted_engine.script, Hold(), Hold()
    script.tells_weights = True

    def start(*, stream: bool) -> tuple[Asked, Hold]:
        script.on_call["/pause"] = pause
        publish(explorer, 1, -2.0)
        wait_until(lambda: pause.held == 1)
        asked = Asked(explorer, stream=stream)
        wait_until(lambda: explorer.deps.pool.waiting == 1)
        script.on_call[PROBES] = probe
        pause.release.set()
        wait_until(lambda: probe.held == 1 and explorer.deps.pool.engines[0].in_flight == 1)
        return asked, probe

    yield explorer, start
    pause.release.set()
    probe.release.set()


def rows(explorer) -> list[tuple[int, int]]:
    with explorer.ledger.read() as connection:
        return [tuple(row) for row in connection.execute(select(experiences.c.version, experiences.c.version_end))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_waited_is_computed_during_the_proof_and_answered_after_it(scripted_engine, waiting, stream):
    explorer, start = waiting
    asked, probe = start(stream=stream)
    wait_until(lambda: len(scripted_engine.script.bodies) == 1)
    assert not asked.status and not rows(explorer)
    probe.release.set()
    asked.join(60)
    assert (asked.status, asked.version) == (200, "1")
    assert rows(explorer) == [(1, 1)]


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_unproven_weights_answered_is_answered_by_the_last_good_version(
    scripted_engine, waiting, stream, is_refused
):
    """Also where these weights made the engine refuse the chat, as vLLM does if a logprob is not a number."""
    explorer, start = waiting
    script = scripted_engine.script
    script.wrong_probe_for.add("v000001")
    if is_refused:
        script.refused.add(CHATS)
    asked, probe = start(stream=stream)
    if not is_refused:
        wait_until(lambda: len(script.bodies) == 1)
    script.on_call["/pause"] = lambda: script.refused.discard(CHATS)  # the last good weights refuse nothing
    probe.release.set()
    asked.join(60)
    assert (asked.status, asked.version) == (200, "0")
    assert "error" not in asked.text
    assert rows(explorer) == [(0, 0)]
    wait_until(lambda: states(explorer)[1] == "REJECTED")


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_that_is_rejected_before_it_is_announced_answers_no_chat(scripted_engine, waiting, stream):
    explorer, start = waiting
    asked, probe = start(stream=stream)
    wait_until(lambda: len(scripted_engine.script.bodies) == 1)
    reject(explorer, 1)
    probe.release.set()
    asked.join(60)
    assert (asked.status, asked.version) == (200, "0")
    assert rows(explorer) == [(0, 0)]


def test_a_chat_that_was_sent_early_waits_no_longer_for_the_announcement_than_for_an_engine(waiting, tmp_path):
    """The engine proves its version, and its owner cannot announce that, because the ledger is locked."""
    explorer, start = waiting
    explorer.deps.pool.wait_s = 1.0
    asked, probe = start(stream=False)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout=60000")
        other.execute("BEGIN IMMEDIATE")
        probe.release.set()
        asked.join(60)
        assert (asked.status, "engines_busy" in asked.text) == (503, True)
        other.rollback()
    wait_until(lambda: states(explorer)[1] == "SERVING")


async def test_an_early_chat_whose_engine_does_not_open_in_time_is_sent_to_one_that_has():
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 0.01)
    proving, other = pool.engines
    pool.switch(proving, {1: "agent"}, 0.0)
    pool.waiting = 1
    with pool.admitted(proving):
        early = (await pool.acquire(None)).early_hold
        assert early is not None
        with pytest.raises(NoEngine):
            await pool.wait_open(early)
        pool.serve(other, {1: "agent"}, Sampling())
        with pytest.raises(WeightsUnproven):
            await pool.wait_open(early)


async def test_an_early_chat_whose_engine_dies_waits_for_another_like_those_that_were_not_sent_early():
    class Http:
        timeout_s = 60.0

        async def post(self, url: str, *_: object) -> object:
            raise EngineUnavailable("it closed the connection")

    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 60.0)
    dispatcher: Any = Dispatcher(pool, Http(), ExplorerMetrics(), {})
    pool.close(pool.engines[0], "taking up version 1")
    asked = asyncio.create_task(dispatcher.fetch(EngineRequest("/chat", {}, "r"), lambda reply: reply))
    await asyncio.sleep(0)
    pool.switch(pool.engines[0], {1: "agent"}, 0.0)
    with pool.admitted(pool.engines[0]):
        for _ in range(10):
            await asyncio.sleep(0)
        assert (pool.engines[0].early_places, pool.waiting, asked.done()) == (0, 1, False)
    asked.cancel()


async def test_an_engine_gets_no_more_chats_before_its_proof_than_it_has_in_flight_and_than_waited():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 60.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    for _ in range(2):
        await pool.acquire(None)
    pool.close(engine, "taking up version 2")
    pool.waiting = 3
    with pool.admitted(engine):
        assert [(await pool.acquire(None)).version for _ in range(2)] == [1, 1]
        assert pool._choose(None, 0, ()) is None
    pool.waiting = 0
    with pool.admitted(engine):
        assert pool._choose(None, 0, ()) is None


@pytest.mark.parametrize("end", [EnginePool.spoil, EnginePool.check, EnginePool.withdraw, None])
async def test_chats_are_sent_early_only_during_the_proof_and_only_if_no_other_engine_is_open(end):
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 60.0)
    proving, other = pool.engines
    for engine in pool.engines:
        pool.serve(engine, {1: "agent"}, Sampling())
    pool.close(proving, "taking up version 2")
    pool.waiting = 1
    pool.hold_back(proving)
    with pool.admitted(proving):
        assert pool._choose(None, 0, ()) is other
        pool.close(other, "taking up version 2")
        assert pool._choose(None, 0, ()) is proving
        if end is not None:
            end(pool, proving, "a reason")
            assert pool._choose(None, 0, ()) is None
    assert pool._choose(None, 0, ()) is None


async def test_an_early_chat_that_goes_on_is_not_sent_again_at_the_next_take_up():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 60.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    pool.close(engine, "taking up version 2")
    pool.waiting = 1
    with pool.admitted(engine):
        early = (await pool.acquire(None)).early_hold
    assert early is not None and early.is_on
    pool.serve(engine, {2: "agent"}, Sampling())
    pool.close(engine, "taking up version 3")
    with pool.admitted(engine):
        await early.wait()
