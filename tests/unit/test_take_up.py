"""The parts of a take-up that stand alone: what is held back, when a version is tried again, who an engine is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from explorer_service.engines.dispatch import Dispatcher, EngineRequest, Exchange
from explorer_service.engines.hold import Hold
from explorer_service.engines.pool import EnginePool
from explorer_service.errors import NoEngine, NoRoom, VersionNotServed, WeightsUnproven
from explorer_service.membership import Membership
from explorer_service.reload.blame import Backoff
from explorer_service.reload.names import engine_key
from explorer_service.reload.ownership import EngineLeases
from shared import clock
from shared.config import EngineAddress
from shared.experience import Sampling
from tests.support.machine import sleeping_machine

machine = sleeping_machine


async def test_what_is_held_back_goes_on_when_the_weights_are_proven():
    hold = Hold()
    hold.begin()
    waiting = asyncio.create_task(hold.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    hold.release()
    await waiting
    assert not hold.is_on


async def test_what_is_held_back_ends_when_the_proof_fails_and_so_does_what_comes_later():
    hold = Hold()
    hold.begin()
    waiting = asyncio.create_task(hold.wait())
    await asyncio.sleep(0)
    hold.spoil("other logprobs")
    with pytest.raises(WeightsUnproven, match="other logprobs"):
        await waiting
    with pytest.raises(WeightsUnproven):
        await hold.wait()


async def test_requests_after_a_failed_proof_are_not_those_that_it_spoiled():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 1.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    before = await pool.acquire(None)
    pool.hold_back(engine)
    pool.spoil(engine, "a reason")
    after = await pool.acquire(None)
    assert before.hold.is_on and not after.hold.is_on


async def test_a_request_is_labelled_by_when_its_parts_came():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 1.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    slot = await pool.acquire(None)
    start = slot.began_at
    pool.switch(engine, {2: "agent"}, start + 10)
    pool.switch(engine, {3: "agent"}, start + 20)
    for came_at, version in ((start + 9, 1), (start + 11, 2), (start + 21, 3)):
        slot.last_at = came_at
        assert slot.last_version == version
    assert slot.first_version == 1
    slot.first_at = start + 15
    assert slot.first_version == 2


async def test_a_request_that_began_before_a_switch_was_noted_is_labelled_by_when_the_weights_were_replaced():
    """A follower that stood still hears of a switch after it has sent requests to the new weights."""
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 1.0)
    (engine,) = pool.engines
    pool.serve(engine, {1: "agent"}, Sampling())
    slot = await pool.acquire(None)
    pool.switch(engine, {2: "agent"}, slot.began_at - 5)
    later = await pool.acquire(None)
    pool.switch(engine, {3: "agent"}, later.began_at + 10)
    slot.last_at = later.last_at = later.began_at + 1
    assert (slot.last_version, later.last_version) == (2, 2)


async def test_who_does_not_know_what_engines_serve_gives_out_no_place_and_passes_nothing_on():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 10.0)
    pool.serve(pool.engines[0], {1: "agent"}, Sampling())
    pool.know_until(clock.since_boot_s(), clock.since_boot_s())
    asked, passed = asyncio.create_task(pool.acquire(None)), asyncio.create_task(pool.wait_awake())
    await asyncio.sleep(0)
    assert pool.waiting == 1 and not asked.done() and not passed.done()
    pool.know_until(clock.since_boot_s() + 60, clock.since_boot_s() + 60)
    assert (await asked).version == 1
    await passed


async def test_who_never_learns_what_engines_serve_is_refused_and_records_nothing():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 0.01)
    pool.serve(pool.engines[0], {1: "agent"}, Sampling())
    pool.know_until(clock.since_boot_s(), clock.since_boot_s())
    with pytest.raises(NoEngine, match="is the database up"):
        await pool.acquire(None)
    with pytest.raises(WeightsUnproven, match="suspended"):
        await pool.wait_awake()


class OneAnswer:
    """A ledger's writer that says yes."""

    async def write(self, work: object) -> bool:
        return True


async def test_a_lease_counts_for_nothing_after_the_machine_has_slept_until_it_is_renewed(machine):
    membership = Membership(OneAnswer(), {})
    leases = EngineLeases(None, OneAnswer(), membership, [EngineAddress(name="e0", url="http://e0")])
    assert await leases.acquire("http://e0") and leases.holds("http://e0")
    machine.sleep(0.1)
    assert leases.holds("http://e0")
    machine.sleep(600.0)
    assert not leases.holds("http://e0")
    assert await leases.acquire("http://e0") and leases.holds("http://e0")
    membership.owned = frozenset()
    membership.heartbeat_at = clock.since_boot_s() + 1  # it says that another explorer has the engine
    assert not leases.holds("http://e0")


def test_a_version_is_tried_again_after_a_time_that_doubles_and_another_one_at_once():
    now = [100.0]
    backoff = Backoff(5.0, lambda: now[0])
    assert backoff.wait_s(1) == 0.0 and backoff.reason(1) == ""
    waits = []
    for _ in range(9):
        backoff.note(1, "it hangs")
        waits.append(backoff.wait_s(1))
    assert waits == [5, 10, 20, 40, 80, 160, 320, 500, 500]
    assert backoff.wait_s(2) == 0.0 and backoff.reason(1) == "it hangs"
    now[0] += 500
    assert backoff.wait_s(1) == 0.0
    backoff.forget(1)
    backoff.note(1, "again")
    assert backoff.wait_s(1) == 5
    backoff.retry(1)
    assert backoff.wait_s(1) == 0.0 and backoff.reason(1) == ""


def test_a_version_for_which_there_was_no_room_waits_less_long_and_until_another_one_is_unloaded():
    backoff = Backoff(5.0, lambda: 100.0)
    waits = []
    for _ in range(5):
        backoff.note(1, NoRoom("no place is free"))
        waits.append(backoff.wait_s(1))
    assert waits == [5, 10, 20, 40, 40]
    backoff.note(2, "it hangs")
    backoff.end_waits_for_room()
    assert (backoff.wait_s(1), backoff.wait_s(2)) == (0.0, 5.0)


def test_a_loopback_url_of_another_machine_is_another_engine(monkeypatch):
    local, remote = (
        EngineAddress(name="a", url="http://127.0.0.1:8101"),
        EngineAddress(name="b", url="http://gpu-7:8101"),
    )
    here = engine_key(local)
    assert here.endswith(" http://127.0.0.1:8101") and engine_key(remote) == "http://gpu-7:8101"
    monkeypatch.setattr("explorer_service.reload.names.machine_name", lambda: "another")
    assert engine_key(local) != here


async def test_a_version_that_is_not_in_service_is_not_listed_among_those_that_are():
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 1.0)
    for engine, version in zip(pool.engines, (1, 2), strict=True):
        pool.serve(engine, {version: "agent"}, Sampling())
    pool.close(pool.engines[0], "taking up version 2")
    with pytest.raises(VersionNotServed, match=r"version 1 is not in service; in service: \[2\]"):
        await pool.acquire(1)


@pytest.mark.parametrize("state", ["away", "lost this chat"])
async def test_a_pinned_version_that_one_engine_refuses_is_unavailable_while_the_other_engine_is_away(state):
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 1.0, adapters=True)
    refusing, other = pool.engines
    pool.pinned.add(7)
    for engine in pool.engines:
        pool.serve(engine, {9: "agent"}, Sampling(), version=9)
    pool.refuse(refusing, 7, "its rank is too large")
    if state == "away":
        pool.withdraw(other, "it does not answer")
    with pytest.raises(NoEngine, match="version 7"):
        await pool.acquire(7, avoid={"e1"} if state == "lost this chat" else ())
    pool.refuse(other, 7, "its rank is too large")
    with pytest.raises(VersionNotServed, match="its rank is too large"):
        await pool.acquire(7)


async def test_a_chat_that_lost_its_engine_waits_for_the_engine_that_is_being_reloaded():
    pool = EnginePool([EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")], 5.0)
    lost, other = pool.engines
    for engine in pool.engines:
        pool.serve(engine, {9: "agent"}, Sampling(), version=9)
    pool.close(other, "taking up version 9")
    waiting = asyncio.create_task(pool.acquire(9, avoid={lost.name}))
    await asyncio.sleep(0)
    pool.serve(other, {9: "agent"}, Sampling(), version=9)
    assert (await waiting).engine is other


async def test_a_chat_of_a_share_whose_engine_is_full_is_answered_by_the_leading_version():
    engines = [EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")]
    pool = EnginePool(engines, 0.01, max_in_flight=1, adapters=True, wanted=lambda: 12)
    pool.serve(pool.engines[0], {12: "agent@12", 13: "agent@13"}, Sampling(), version=12)
    pool.serve(pool.engines[1], {12: "agent@12"}, Sampling(), version=12)
    dispatcher = Dispatcher(pool, None, None, {})
    request = EngineRequest("/v1/chat/completions", {}, "id", preferred=13)
    slots = [await dispatcher._acquire(request, []) for _ in range(2)]
    assert [(slot.version, slot.engine.name) for slot in slots] == [(13, "e0"), (12, "e1")]


async def test_a_chat_of_a_share_waits_no_longer_than_others(monkeypatch):
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 8.0, max_in_flight=1, adapters=True)
    pool.serve(pool.engines[0], {12: "agent@12", 13: "agent@13"}, Sampling(), version=12)
    waits: list[float] = []

    async def wait_for(self: EnginePool, version: int | None, wait_s: float, *_: object) -> None:
        waits.append(wait_s)
        raise NoEngine("no engine was free", "engines_busy")

    await pool.acquire(None)
    monkeypatch.setattr(EnginePool, "_wait_for", wait_for)
    with pytest.raises(NoEngine):
        await Dispatcher(pool, None, None, {})._acquire(EngineRequest("/v1/completions", {}, "id", preferred=13), [])
    assert sum(waits) == 8.0


async def test_the_wanted_version_answers_as_soon_as_it_is_known_though_no_engine_moves():
    wanted, names = [3], {1: "agent@1", 3: "agent@3"}
    engines = [EngineAddress(name=name, url=f"http://{name}") for name in ("e0", "e1")]
    pool = EnginePool(engines, 1.0, adapters=True, wanted=lambda: wanted[0])
    pool.serve(pool.engines[1], {3: "agent@3"}, Sampling(), version=3)
    pool.serve(pool.engines[0], names, Sampling(), version=1)
    wanted[0] = 1
    assert (await pool.acquire(None)).version == 1


async def test_a_reply_is_held_back_no_longer_than_a_request_may_take():
    pool = EnginePool([EngineAddress(name="e0", url="http://e0")], 1.0)
    pool.serve(pool.engines[0], {1: "agent"}, Sampling())
    slot = await pool.acquire(None)
    slot.hold.begin()
    dispatcher = Dispatcher(pool, SimpleNamespace(timeout_s=0.01), None, {})
    with pytest.raises(WeightsUnproven, match="has not proven its weights within"):
        await Exchange(slot, None, 0.0, dispatcher)._wait(slot.hold)
