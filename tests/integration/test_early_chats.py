"""Chats that wait for a take-up are sent to the engine while it proves the version, and answered once it has."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select

from explorer_service.engines.pool import EnginePool
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


async def test_an_engine_gets_no_more_chats_before_its_proof_than_it_has_in_flight_and_than_waited():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 60.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    for _ in range(2):
        await pool.acquire(None)
    pool.close(engine, "taking up version 2")
    pool.waiting = 3
    pool.admit(engine)
    assert [(await pool.acquire(None)).version for _ in range(2)] == [1, 1]
    assert pool._choose(None, 0, ()) is None
    pool.waiting = 0
    pool.admit(engine)
    assert pool._choose(None, 0, ()) is None


@pytest.mark.parametrize("end", [EnginePool.go_on, EnginePool.spoil, EnginePool.check, EnginePool.withdraw])
async def test_chats_are_sent_early_only_during_the_proof_and_only_if_no_other_engine_is_open(end):
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 60.0)
    proving, other = pool.engines
    for engine in pool.engines:
        pool.serve(engine, {1: "agent"}, Sampling())
    pool.close(proving, "taking up version 2")
    pool.waiting = 1
    pool.hold_back(proving)
    pool.admit(proving)
    assert pool._choose(None, 0, ()) is other
    pool.close(other, "taking up version 2")
    assert pool._choose(None, 0, ()) is proving
    end(pool, proving, *([] if end is EnginePool.go_on else ["a reason"]))
    assert pool._choose(None, 0, ()) is None


async def test_an_early_chat_that_goes_on_is_not_sent_again_at_the_next_take_up():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 60.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    pool.close(engine, "taking up version 2")
    pool.waiting = 1
    pool.admit(engine)
    early = (await pool.acquire(None)).early_hold
    assert early is not None and early.is_on
    pool.serve(engine, {2: "agent"}, Sampling())
    pool.close(engine, "taking up version 3")
    pool.admit(engine)
    await early.wait()
