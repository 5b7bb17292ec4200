"""Several engines behind one explorer: who is chosen, who waits, and what happens when one dies."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest
from aiohttp import web

from tests.support.forms import one_database
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import wait_until

pytestmark = one_database


@pytest.fixture
def engines():
    both = [ScriptedEngine(), ScriptedEngine()]
    yield both
    for engine in both:
        engine.stop()


def say(explorer, text, **body):
    return explorer.http.post("/chat", json={"messages": [{"role": "user", "content": text}], **body})


def all_serve(explorer):
    wait_until(lambda: all(e["state"] == "serving" for e in explorer.http.get("/status").json()["engines"]))
    return explorer


def test_chats_spread_over_the_engines(engines, start_explorer):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    for engine in engines:
        engine.script.delay_s = 0.3
    with ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(lambda n: say(explorer, f"question {n}"), range(24)))
    assert all(reply.status_code == 200 for reply in replies)
    shares = [len(engine.script.bodies) for engine in engines]
    assert sum(shares) == 24 and min(shares) >= 8


def test_turns_of_one_conversation_prefer_the_engine_that_has_its_prefix(engines, start_explorer):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    for n in range(6):
        for engine in engines:
            engine.script.bodies.clear()
        messages = [{"role": "user", "content": f"question {n}"}]
        for _ in range(4):
            reply = explorer.http.post("/chat", json={"messages": messages}).json()["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "more"}]
        assert sorted(len(engine.script.bodies) for engine in engines) == [0, 4]


def test_a_chat_whose_engine_dies_is_answered_by_another(engines, start_explorer):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    engines[0].script.die_on_chat = True
    replies = [say(explorer, f"question {n}") for n in range(8)]
    replies += [say(explorer, f"stream {n}", stream=True) for n in range(4)]
    assert all(reply.status_code == 200 for reply in replies)
    assert len(engines[1].script.bodies) == 12


def test_a_chat_that_an_engine_does_not_answer_in_time_is_not_sent_to_another(engines, start_explorer):
    explorer = all_serve(start_explorer([engine.url for engine in engines], request_timeout_s=0.5))
    pool, chosen = explorer.deps.pool, []
    acquire = pool.acquire

    async def acquire_noted(*given, **named):
        slot = await acquire(*given, **named)
        chosen.append(slot.engine.name)
        return slot

    pool.acquire = acquire_noted
    for engine in engines:
        engine.script.delay_s = 600.0
    for body in ({}, {"stream": True}):
        reply = say(explorer, "hello", **body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_lost")
    assert len(chosen) == 2


def test_a_chat_whose_only_engine_dies_gets_503_with_retry_after(scripted_engine, explorer):
    scripted_engine.script.die_on_chat = True
    reply = say(explorer, "hello")
    assert reply.status_code == 503
    assert "Retry-After" in reply.headers


def ask(explorer, path, text, **body):
    question = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return explorer.http.post(path, json={**question, **body})


def lose_core(engine, path):
    """The next request there kills the engine core: vLLM's API process answers it with 500, and 503 on /health."""
    asked = []

    def die():
        asked.append(path)
        engine.script.healthy = False

    engine.script.on_call[path] = die
    engine.script.refused.add(path)
    return asked


surfaces = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
paths = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])


@paths
@surfaces
def test_what_an_engine_answers_with_500_when_its_core_has_died_is_answered_by_another(
    path, stream, engines, start_explorer
):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    asked = lose_core(engines[0], path)
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda n: ask(explorer, path, f"question {n}", stream=stream), range(16)))
    assert [reply.status_code for reply in replies] == [200] * 16
    assert asked and len(engines[1].script.bodies) == 16
    assert explorer.deps.pool.engines[0].state == "unavailable"


@paths
@surfaces
def test_what_the_only_engine_answers_with_500_when_its_core_has_died_gets_503_with_retry_after(
    path, stream, scripted_engine, explorer
):
    lose_core(scripted_engine, path)
    for expected in ("engine_lost", "engines_unavailable"):
        reply = ask(explorer, path, "hello", stream=stream)
        assert reply.status_code == 503 and "Retry-After" in reply.headers
        assert reply.json()["error"]["code"] == expected


@surfaces
def test_a_500_of_an_engine_that_is_healthy_passes_on(stream, engines, start_explorer):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    for engine in engines:
        engine.script.refused.add("/v1/chat/completions")
    reply = say(explorer, "hello", stream=stream)
    assert (reply.status_code, reply.json()) == (500, {"error": "a fault was put in"})
    assert [engine.state for engine in explorer.deps.pool.engines] == ["serving"] * 2


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_engine_without_developer_mode_serves_what_it_was_started_with(
    kind, scripted_engine, start_explorer, monkeypatch
):
    """vLLM has the route /resume in developer mode alone; nothing else can have paused it."""
    monkeypatch.setattr("explorer_service.reload.health.STALLED_AFTER_S", 0.5)

    def has_no_route():
        raise web.HTTPNotFound

    scripted_engine.script.on_call["/resume"] = has_no_route
    explorer = start_explorer([scripted_engine.url], model={"kind": kind}).wait_ready()
    scripted_engine.script.delay_s = 2.5  # long enough to be taken for an engine that somebody paused
    assert say(explorer, "hello").headers["X-Flywheel-Version"] == "0"
    assert 'reload_failures_total{reason="refused"}' not in explorer.http.get("/metrics").text


def test_chats_wait_for_room_and_too_many_are_refused(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], max_in_flight=2, max_waiting=2, engine_wait_s=60.0).wait_ready()
    pool = explorer.deps.pool
    scripted_engine.script.hung.add("/v1/chat/completions")
    with ThreadPoolExecutor(4) as threads:
        accepted = [threads.submit(say, explorer, f"question {number}") for number in range(4)]
        wait_until(lambda: (pool.engines[0].in_flight, pool.waiting) == (2, 2))
        refused = [say(explorer, f"question {number}") for number in range(4, 8)]
        scripted_engine.script.hung.clear()
        assert [reply.result().status_code for reply in accepted] == [200] * 4
    assert [reply.status_code for reply in refused] == [503] * 4
    assert all("Retry-After" in reply.headers and reply.json()["error"]["code"] == "overloaded" for reply in refused)


@pytest.mark.parametrize("about", [{}, {"store": False}], ids=["recorded", "unrecorded"])
def test_a_chat_that_an_engine_gives_up_is_answered_by_another(engines, start_explorer, about):
    explorer = all_serve(start_explorer([engine.url for engine in engines]))
    engines[0].script.finish_reason = "abort"  # as vLLM's while it stops
    replies = [say(explorer, f"question {n}", **about) for n in range(8)]
    assert [reply.json()["choices"][0]["finish_reason"] for reply in replies] == ["stop"] * 8
    assert engines[0].script.bodies, "it was asked"
    assert explorer.http.get("/status").json()["rows"]["RECORDED"] == (0 if about else 8)


def test_a_chat_that_the_only_engine_gives_up_is_no_answer_and_no_row(scripted_engine, explorer):
    scripted_engine.script.finish_reason = "abort"
    reply = say(explorer, "plain")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_lost")
    assert "Retry-After" in reply.headers
    for about in ({}, {"store": False}):
        streamed = say(explorer, "streamed", stream=True, **about).text
        assert "engine_lost" in streamed and "[DONE]" not in streamed and '"abort"' not in streamed
    assert explorer.http.get("/status").json()["rows"]["RECORDED"] == 0


def test_a_plain_chat_whose_caller_goes_away_is_aborted_and_not_recorded(scripted_engine, explorer):
    scripted_engine.script.delay_s = 600.0
    caller = HTTPConnection(explorer.http.base_url.host, explorer.http.base_url.port)
    caller.request("POST", "/chat", json.dumps({"messages": [{"role": "user", "content": "x"}]}), explorer.http.headers)
    wait_until(lambda: len(scripted_engine.script.bodies) == 1)
    caller.close()
    wait_until(lambda: scripted_engine.script.aborted == 1)
    assert explorer.http.get("/status").json()["rows"]["RECORDED"] == 0
