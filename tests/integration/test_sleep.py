"""A machine sleeps and wakes up: its explorer looks first, and names the versions that sampled what it has received."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from explorer_service.engines.connection import EngineConnection
from explorer_service.engines.dispatch import Dispatcher, Exchange
from explorer_service.engines.pool import EnginePool
from explorer_service.membership import Membership
from explorer_service.reload import follow
from explorer_service.reload.follow import EngineFollower
from explorer_service.reload.ownership import EngineLeases
from explorer_service.reload.standstill import Standstill
from shared import clock
from shared.config import EngineAddress
from shared.experience import Sampling
from shared.ledger import transitions
from shared.ledger.connect import Ledger, database_time
from shared.ledger.tables import engines, experiences
from shared.ledger.transitions import engine_leases
from tests.support.machine import sleeping_machine
from tests.support.postgres import sqlite_alone
from tests.support.reloads import SETTINGS, shown, states, versions_of_a_stream_across
from tests.support.servers import make_config, publish, wait_until, write_scripted_version

machine = sleeping_machine
database_url = sqlite_alone  # its host's clock is this machine's

URL = "http://gpu:8101"
OWNER = "another explorer"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SLEEP_S = 600.0


class Writer:
    """Writes to the ledger at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def write(self, work: Callable[[Connection], Any]) -> Any:
        with self._ledger.write() as connection:
            return work(connection)


class Follower:
    """An explorer of this machine. Its engine serves version 5, is of another machine, and has another owner."""

    def __init__(self, ledger: Ledger) -> None:
        address = EngineAddress(name="e0", url=URL)
        writer: Any = Writer(ledger)
        self.ledger = ledger
        self.pool = EnginePool([address], 60.0)
        (self.engine,) = self.pool.engines
        self.membership = Membership(writer, {})
        self.leases = EngineLeases(ledger, writer, self.membership, [address])

    async def begin(self) -> None:
        await self.membership.heartbeat()
        self._standstill = Standstill(self.pool, self.membership, self.leases)
        await self.leases.acknowledge(URL, self.owner_announces("serving", 5), 0, [])
        self.pool.serve(self.engine, {5: "agent"}, Sampling())
        await self.look()

    async def look(self) -> None:
        """What it does every second."""
        await self._standstill._check()

    async def ask(self) -> tuple[EngineConnection, Exchange]:
        """A chat that the engine has got, and the connection on which its answer comes."""
        slot = await self.pool.acquire(None)
        connection = EngineConnection(asyncio.get_running_loop(), 1 << 20)
        connection.connection_made(SimpleNamespace(write=lambda _: None, abort=lambda: None))
        response = connection.send(b"", 60.0, lambda _connection, _reusable: None)
        dispatcher = Dispatcher(self.pool, SimpleNamespace(timeout_s=60.0), None, {})
        return connection, Exchange(slot, response, 0.0, dispatcher)

    def owner_announces(self, state: str, version: int, switched_s_ago: float = 0.0) -> int:
        with self.ledger.write() as connection:
            transitions.heartbeat(connection, OWNER, {})
            assert transitions.acquire_engine(connection, URL, OWNER)
            generation = transitions.set_engine_state(connection, URL, OWNER, state, version)
            connection.execute(update(engines).values(switched_at=database_time(connection) - switched_s_ago))
        assert generation is not None
        return generation


@pytest.fixture
def follower(machine, ledger) -> Follower:
    return Follower(ledger)


async def test_after_a_sleep_no_chat_goes_out_and_no_reply_is_passed_on_before_the_explorer_has_looked(
    follower, machine
):
    await follower.begin()
    connection, exchange = await follower.ask()
    machine.sleep(SLEEP_S)
    connection.data_received(REPLY)  # it waited in the socket
    reply, chat = asyncio.create_task(exchange.read()), asyncio.create_task(follower.pool.acquire(None))
    done, _ = await asyncio.wait((reply, chat), timeout=0.1)
    assert not done
    await follower.look()
    assert (await reply).content == b"{}" and (await chat).version == 5


async def test_a_stream_names_the_version_that_sampled_its_first_token_if_the_weights_were_replaced_in_a_sleep(
    follower, machine
):
    await follower.begin()
    connection, exchange = await follower.ask()
    parts = exchange.chunks()
    connection.data_received(STREAM + b"3\r\none\r\n")
    assert await anext(parts) == b"one"
    machine.sleep(SLEEP_S)
    follower.owner_announces("serving", 6, switched_s_ago=SLEEP_S / 2)
    await follower.look()
    row = await follower.leases.read(URL)
    follower.pool.switch(follower.engine, {row.version: "agent"}, row.switched_at)
    follower.pool.serve(follower.engine, {row.version: "agent"}, Sampling())
    connection.data_received(b"3\r\ntwo\r\n")
    assert await anext(parts) == b"two"
    assert (exchange.slot.first_version, exchange.slot.last_version) == (5, 6)


async def test_a_stream_whose_head_comes_while_replies_are_held_back_names_the_version_of_its_first_token(follower):
    await follower.begin()
    connection, exchange = await follower.ask()
    follower.pool.close(follower.engine, "another explorer reloads it")
    follower.pool.hold_back(follower.engine)
    connection.data_received(STREAM)
    proven = asyncio.create_task(exchange.proven())
    connection.data_received(b"3\r\none\r\n")
    switched_at = clock.since_boot_s()
    connection.data_received(b"3\r\ntwo\r\n")
    await asyncio.sleep(0)
    follower.pool.switch(follower.engine, {6: "agent"}, switched_at)
    follower.pool.serve(follower.engine, {6: "agent"}, Sampling())
    assert await anext((await proven).chunks()) == b"onetwo"
    assert (exchange.slot.first_version, exchange.slot.last_version) == (5, 6)


async def test_a_follower_that_slept_between_the_engines_label_and_its_opening_does_not_open_it_as_it_was(
    follower, machine, tmp_path, monkeypatch
):
    await follower.begin()
    follower.owner_announces("serving", 6)
    is_read, may_go_on, label = threading.Event(), threading.Event(), ["6:x"]

    async def read_label() -> str:
        return label[0]

    def read_defaults(_folder: Path) -> Sampling:
        is_read.set()
        assert may_go_on.wait(60)
        return Sampling()

    monkeypatch.setattr(follow, "read_sampling_defaults", read_defaults)
    reloading: Any = SimpleNamespace(
        pool=follower.pool,
        leases=follower.leases,
        loads_adapters=False,
        named=lambda version: {version: "agent"},
        config=make_config(tmp_path, [URL]),
    )
    engine_follower = EngineFollower(follower.engine, SimpleNamespace(read_label=read_label), reloading)
    follower.pool.close(follower.engine, "another explorer reloads it")
    following = asyncio.create_task(engine_follower.follow())
    assert await asyncio.to_thread(is_read.wait, 60)
    machine.sleep(SLEEP_S)
    follower.owner_announces("serving", 7)
    label[0] = "7:y"
    await follower.look()
    may_go_on.set()
    await following
    assert not follower.engine.is_open
    await engine_follower.follow()
    assert (await follower.pool.acquire(None)).version == 7


async def test_an_owner_that_slept_announces_its_last_replacement_of_weights_by_the_same_time_as_before(
    follower, machine
):
    leases = follower.leases
    assert await leases.acquire(URL)
    follower.pool.serve(follower.engine, {5: "agent"}, Sampling())
    slot = await follower.pool.acquire(None)
    leases.note_switch(URL, slot.began_at)
    stored = []
    for state in ("serving", "degraded"):
        await leases.announce(URL, state, 5)
        with follower.ledger.read() as connection:
            stored.append(connection.execute(select(engines.c.switched_at)).scalar_one())
        machine.sleep(SLEEP_S)
    assert stored[1] == pytest.approx(stored[0], abs=60.0)


@pytest.mark.usefixtures("patient_health")
def test_an_owner_whose_machine_has_slept_before_names_the_versions_that_sampled_the_first_and_the_last_token(
    machine, start_explorer, scripted_engine
):
    machine.sleep(SLEEP_S)
    explorer = start_explorer([scripted_engine.url]).wait_ready()
    assert versions_of_a_stream_across(explorer, scripted_engine.script, 1) == (0, 1)


@pytest.mark.usefixtures("patient_health")
def test_an_owner_that_slept_in_its_proof_forwards_nothing_before_it_knows_what_another_one_has_loaded(
    machine, start_explorer, scripted_engine, monkeypatch
):
    monkeypatch.setattr(engine_leases, "ENGINE_LEASE_S", 2 * SLEEP_S)  # the other owner's lease lasts until the end
    monkeypatch.setattr(transitions.membership, "_DEAD_S", 4 * SLEEP_S)  # and nobody takes that owner for dead
    explorer = start_explorer([scripted_engine.url], reload=SETTINGS).wait_ready()
    publish(explorer, 0)
    wait_until(lambda: states(explorer)[0] == "SERVING" and shown(explorer)["state"] == "serving")
    script, is_over = scripted_engine.script, threading.Event()
    script.tells_weights = True
    script.stream_slowly()

    def sleep_while_another_owner_loads_version_2() -> None:
        if is_over.is_set():
            return
        with explorer.ledger.write() as connection:
            transitions.heartbeat(connection, OWNER, {})
            now = database_time(connection)
            moved = {"owner": OWNER, "state": "serving", "version": 2, "generation": engines.c.generation + 2}
            times = {"owner_until": now + 2 * SLEEP_S, "switched_at": now}
            connection.execute(update(engines).values(**moved, **times))
        script.label, script.gap_s = "2:y", 0.0
        wait_until(lambda: script.events >= len(script.reply_ids))
        machine.sleep(SLEEP_S)
        is_over.set()

    with explorer.http.stream("POST", "/chat", json={"messages": [], "stream": True}) as reply:
        events = reply.iter_lines()
        next(events)
        write_scripted_version(explorer.config.root, 2, -2.0)
        probe = {"/v1/completions": sleep_while_another_owner_loads_version_2}
        script.on_call["/resume"] = lambda: script.on_call.update(probe)
        publish(explorer, 1)
        assert [event for event in events if event][-1] == "data: [DONE]"
    assert is_over.is_set()
    with explorer.ledger.read() as connection:
        row = connection.execute(select(experiences.c.version, experiences.c.version_end)).one()
    assert tuple(row) == (0, 2)
