"""An engine changes its owner, or its owner finds other weights there: rows name the versions that sampled them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field

import pytest
from sqlalchemy import select, update

from explorer_service.engines.admin import HEALTH_TIMEOUT_S
from explorer_service.errors import EngineUnavailable
from shared.experience import Tokens
from shared.ledger.tables import engines, experiences, payloads
from tests.support.heartbeats import frequent_heartbeats  # noqa: F401 — a fixture
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, announced, shown
from tests.support.servers import RunningExplorer, publish, served, wait_joined, wait_until

pytestmark = pytest.mark.usefixtures("frequent_heartbeats")
database_url = sqlite_alone  # nothing here depends on the database


@pytest.fixture
def owner_first(scripted_engine, start_explorer) -> list[RunningExplorer]:
    """Three explorers of one engine that serves version 1; the first one owns it."""
    started = [start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready() for _ in range(3)]
    publish(started[0], 0)
    publish(started[0], 1, -2.0)
    wait_until(lambda: all(served(explorer) == "1" for explorer in started))
    wait_joined(started)
    return sorted(started, key=lambda explorer: not shown(explorer)["owned"])


def hand_over(owner: RunningExplorer, other: RunningExplorer) -> None:
    """As when the owner's lease ran out while it stood still. The other one's lease is renewed until it knows of it."""
    url = owner.config.explorer.engines[0].url

    def is_handed_over() -> bool:
        with owner.ledger.write() as connection:
            new = {"owner": other.deps.membership.id, "owner_until": time.time() + 5.0}
            connection.execute(update(engines).values(**new))
        owner.deps.leases.forget(url)
        return bool(shown(other)["owned"]) and not shown(owner)["owned"]

    wait_until(is_handed_over)


async def no_heartbeat() -> None:
    """In the place of that of an explorer that is dead, or stands still."""


@dataclass
class Stream:
    """A chat that is in flight at an explorer while something happens; see `Script.streams_wait`."""

    explorer: RunningExplorer
    msg_id: str = ""
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Stream:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: len(self.lines) > 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(240)
        assert not self._thread.is_alive(), "the stream does not end"

    def _run(self) -> None:
        with self.explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
            for line in reply.iter_lines():
                self.lines += [line] if line else []
                self.msg_id = self.msg_id or json.loads(line[6:])["id"]

    def sampled(self) -> tuple[tuple[float, ...], tuple[int, int]]:
        """The versions that sampled the first and the last token, by the engine's word and by the row."""
        assert self.lines[-1] == "data: [DONE]", self.lines[-1]
        named = select(experiences.c.version, experiences.c.version_end, payloads.c.tokens).join(payloads)
        with self.explorer.ledger.read() as connection:
            row = connection.execute(named.where(experiences.c.msg_id == self.msg_id)).one()
        logprobs = Tokens.decode(row.tokens).logprobs
        return (-logprobs[0], -logprobs[-1]), (row.version, row.version_end)


def test_who_has_an_engine_again_serves_what_the_owner_before_it_loaded(owner_first, scripted_engine):
    first, second, _ = owner_first
    hand_over(first, second)
    publish(first, 2, -3.0)
    wait_until(lambda: all(served(explorer) == "2" for explorer in owner_first))
    hand_over(second, first)
    scripted_engine.script.refused.add("/flywheel/stage")
    publish(first, 3, -4.0)
    wait_until(lambda: shown(first)["state"] == "degraded")
    assert (shown(first)["version"], scripted_engine.script.loaded) == (2, "v000002")


def test_streams_of_all_explorers_end_when_the_owner_finds_other_weights(owner_first, scripted_engine):
    script = scripted_engine.script
    script.streams_wait, holds = True, [explorer.deps.pool.engines[0].hold for explorer in owner_first]
    with Stream(owner_first[0]) as own, Stream(owner_first[1]) as other:
        scripted_engine._hold(owner_first[0].config.root / "versions/v000000")
        script.label = "0:" + "0" * 16
        wait_until(lambda: not any(e.deps.pool.engines[0].hold in holds for e in owner_first))  # all have learned it
        script.streams_wait = False
    for stream in (own, other):
        assert "weights_unproven" in stream.lines[-1]


def test_a_new_owner_that_finds_other_weights_gives_the_engine_no_chats_until_it_has_the_right_ones(
    owner_first, scripted_engine
):
    first, second, _ = owner_first
    script, leases, acquire = scripted_engine.script, second.deps.leases, second.deps.leases.acquire
    staged = threading.Event()

    async def acquire_with_other_weights(url):
        if is_owner := await acquire(url):
            leases.acquire = acquire  # once: each renewal comes here
            script.hung.add("/flywheel/stage")
            script.on_call["/flywheel/stage"] = staged.set
            scripted_engine._hold(first.config.root / "versions/v000000")
            script.label = "0:" + "0" * 16
        return is_owner

    leases.acquire = acquire_with_other_weights
    hand_over(first, second)
    assert staged.wait(240)
    assert shown(second)["state"] == "checking" and announced(second) == ("checking", None)
    script.hung.clear()
    wait_until(lambda: all(shown(explorer)["state"] == "serving" for explorer in owner_first))
    assert (served(second), script.loaded) == ("1", "v000001")


def test_a_stream_goes_on_when_the_first_version_replaces_what_its_engine_was_started_with(
    scripted_engine, start_explorer
):
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    scripted_engine.script.streams_wait = True
    with Stream(explorer) as stream:
        publish(explorer, 0)
        wait_until(lambda: scripted_engine.script.loaded == "v000000")
        scripted_engine.script.streams_wait = False
    assert stream.lines[-1] == "data: [DONE]"


def test_a_stream_that_crosses_a_reload_names_both_versions_where_another_chat_had_just_broken_off(
    owner_first, scripted_engine
):
    script, other = scripted_engine.script, owner_first[1]
    script.end_streams_after_a_load()
    leases, read, lost = other.deps.leases, other.deps.leases.read, []

    async def read_when_a_chat_has_broken_off(url):
        row = await read(url)
        if row is not None and row.state == "reloading" and not lost:
            lost.append(other.deps.pool.engines[0])
            other.deps.pool.withdraw(lost[0], "it closed the connection")
        return row

    leases.read = read_when_a_chat_has_broken_off
    with Stream(other) as stream:
        publish(owner_first[0], 2, -3.0)
    assert lost and stream.sampled() == ((1.0, 2.0), (1, 2))


def test_a_stream_that_ends_after_a_reload_names_both_versions_at_an_explorer_that_reads_the_ledger_slowly(
    owner_first, scripted_engine
):
    script, other = scripted_engine.script, owner_first[1]
    script.end_streams_after_a_load()
    script.reload_s, script.reply_ids = 1.0, [11, 12]
    leases, read = other.deps.leases, other.deps.leases.read

    async def read_slowly(url):
        row = await read(url)
        await asyncio.sleep(script.reload_s if row.version == 2 else 0.0)
        return row

    leases.read = read_slowly
    with Stream(other) as stream:
        publish(owner_first[0], 2, -3.0)
    assert stream.sampled() == ((1.0, 2.0), (1, 2))


def test_streams_of_all_explorers_wait_for_an_engine_that_answers_nobody_while_it_loads(
    owner_first, scripted_engine, monkeypatch
):
    monkeypatch.setattr("explorer_service.engines.admin.HEALTH_TIMEOUT_S", HEALTH_TIMEOUT_S)
    script = scripted_engine.script
    script.end_streams_after_a_load()

    def load_busily() -> None:
        script.streams_wait = False
        script.hung.add("/health")
        time.sleep(HEALTH_TIMEOUT_S + 1.0)
        script.hung.discard("/health")

    script.on_call["/collective_rpc"] = load_busily
    with Stream(owner_first[0]) as own, Stream(owner_first[1]) as other:
        publish(owner_first[0], 2, -3.0)
    for stream in (own, other):
        assert stream.sampled() == ((1.0, 2.0), (1, 2))


def test_streams_that_cross_a_reload_name_both_versions_where_its_owner_died_in_it(owner_first, scripted_engine):
    script, owner = scripted_engine.script, owner_first[0]
    script.end_streams_after_a_load()
    require_held = owner.deps.leases.require_held

    async def die_when_loaded(url, generation=None):
        if script.label.startswith("2:"):
            await asyncio.Event().wait()
        await require_held(url, generation)

    owner.deps.leases.require_held = die_when_loaded
    with Stream(owner_first[1]) as one, Stream(owner_first[2]) as another:
        publish(owner, 2, -3.0)
        wait_until(lambda: script.label.startswith("2:"))
        owner.deps.membership.heartbeat = no_heartbeat
    for stream in (one, another):
        assert stream.sampled() == ((1.0, 2.0), (1, 2))


def test_streams_outlive_an_owner_that_died_in_a_load_of_which_the_engine_says_nothing(
    scripted_engine, start_explorer, monkeypatch
):
    """vLLM's core, which has the label, answers when it has loaded."""
    settings = SETTINGS | {"answer_timeout_s": 8.0}
    both = [start_explorer([scripted_engine.url], reload=settings).wait_ready() for _ in range(2)]
    for version in (0, 1):
        publish(both[0], version, -1.0 - version)
        wait_until(lambda version=version: all(served(explorer) == str(version) for explorer in both))
    wait_joined(both)
    owner, other = sorted(both, key=lambda explorer: not shown(explorer)["owned"])
    script, loads, asked = scripted_engine.script, [], threading.Event()
    script.end_streams_after_a_load()

    def load_slowly() -> None:
        loads.append("begun")
        script.streams_wait = False
        if len(loads) == 1:
            owner.deps.membership.heartbeat = no_heartbeat
            script.hung.add("/weight_info")
            script.on_call["/weight_info"] = asked.set
            asked.wait(240)  # until the other one has it
            time.sleep(settings["answer_timeout_s"] + 1.0)
            script.hung.discard("/weight_info")

    script.on_call["/collective_rpc"] = load_slowly
    with Stream(other) as stream:
        publish(owner, 2, -3.0)
    assert stream.sampled() == ((1.0, 2.0), (1, 2))


def test_an_owner_that_does_not_reach_its_engine_leaves_it_to_an_explorer_that_does(owner_first):
    first, *others = owner_first
    admin = first.deps.dispatcher._health_checks["e0"].__self__

    async def fail() -> None:
        raise EngineUnavailable("no route to host")

    admin.check_health = fail
    wait_until(lambda: shown(first)["state"] == "unavailable")
    wait_until(lambda: any(shown(other)["owned"] for other in others))
    wait_until(lambda: all(shown(other)["state"] == "serving" for other in others))
    del admin.check_health
    wait_until(lambda: shown(first)["state"] == "serving" and not shown(first)["owned"])


def test_a_load_of_a_former_owner_that_comes_late_is_noticed_and_replaced(owner_first, scripted_engine):
    script, owner, (other, _) = scripted_engine.script, owner_first[0], owner_first[1:]
    admin, is_sent, comes = owner.deps.dispatcher._health_checks["e0"].__self__, threading.Event(), threading.Event()
    reload_weights = admin.reload_weights

    async def reload_late(folder):
        owner.deps.membership.heartbeat = no_heartbeat
        is_sent.set()
        await asyncio.to_thread(comes.wait, 240)
        await reload_weights(folder)

    admin.reload_weights = reload_late
    publish(owner, 2, -3.0)
    assert is_sent.wait(240)
    wait_until(lambda: served(other) == "2")
    publish(other, 3, -4.0)
    wait_until(lambda: served(other) == "3")
    comes.set()
    wait_until(lambda: script.calls.count("reload v000002") == 2)
    wait_until(lambda: script.calls.count("reload v000003") == 2)
    wait_until(lambda: served(other) == "3")
    assert script.loaded == "v000003" and script.label.startswith("3:")
