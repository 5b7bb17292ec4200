"""learn while no engine, or no explorer, answers: its runs wait, and nothing is dropped or counted as a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import flywheel
import openai
import pytest

from tests.sdk.conftest import TASKS, count, learn, rows, say_async
from tests.sdk.test_client import answering
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config, wait_until
from tests.support.time_limits import end_when


async def hear(model: flywheel.Model) -> None:
    """One chat, as a stream."""
    async with model.async_openai(max_retries=0, timeout=600) as openai:
        messages: Any = [{"role": "user", "content": "hi"}]
        async for _ in await openai.chat.completions.create(model=model.name, messages=messages, stream=True):
            pass


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_restarts_costs_no_run_and_is_no_failure(explorer, scripted_engine, tmp_path, streams):
    scripted_engine.script.dead_s = 5.0
    scripted_engine.script.streams_wait = streams
    begun: list[Any] = []

    async def workflow(task: Any, model: flywheel.Model) -> float:
        begun.append(task)
        if len(begun) == len(TASKS):  # in the stream of each
            await asyncio.to_thread(wait_until, lambda: scripted_engine.script.events >= len(TASKS) - 1 or not streams)
            scripted_engine.die()
            scripted_engine.script.streams_wait = False
        await (hear(model) if streams else say_async(model))
        return 1.0

    report = learn(explorer, tmp_path, workflow, retries=0)
    assert (report.stopped, report.rewarded, report.dropped, report.failures) == ("done", len(TASKS), 0, {})
    assert len(begun) > len(TASKS)
    assert [row.reward for row in rows(explorer)] == [1.0] * len(TASKS)


@pytest.fixture
def restarting(scripted_engine: ScriptedEngine, tmp_path: Any) -> Iterator[list[RunningExplorer]]:
    """An explorer whose test restarts it: the last one runs."""
    found = [RunningExplorer(make_config(tmp_path, [scripted_engine.url])).wait_ready()]
    yield found
    found[-1].stop()


def test_an_explorer_that_restarts_costs_no_run_and_is_no_failure(restarting, tmp_path):
    first = restarting[0]
    begun: list[Any] = []

    def start_again() -> None:
        restarting.append(RunningExplorer(first.config).wait_ready())

    async def workflow(task: Any, model: flywheel.Model) -> float:
        begun.append(task)
        if len(begun) == 1:
            await asyncio.to_thread(first.stop)
            threading.Timer(2.0, start_again).start()
        return await count(task, model)

    report = learn(first, tmp_path, workflow, at_once=1, retries=0)
    wait_until(lambda: len(restarting) == 2)
    assert (report.stopped, report.rewarded, report.dropped, report.failures) == ("done", len(TASKS), 0, {})
    assert len(begun) == len(TASKS) + 1


def test_a_run_that_waits_for_an_engine_when_learn_is_ended_is_made_by_a_later_start(
    explorer, scripted_engine, tmp_path
):
    scripted_engine.script.dead_s = 6.0
    begun: list[Any] = []

    async def workflow(task: Any, model: flywheel.Model) -> float:
        begun.append(task)
        if len(begun) == 1:
            scripted_engine.die()
        return await count(task, model)

    report = learn(explorer, tmp_path, workflow, TASKS[:1], seconds=2.0)
    assert (report.stopped, report.runs, report.failures) == ("time", 0, {})
    explorer.wait_ready()
    assert learn(explorer, tmp_path, workflow, TASKS[:1]).rewarded == 1


def test_an_engine_that_stays_away_ends_the_runs_that_wait_for_it(explorer, scripted_engine, tmp_path):
    scripted_engine.script.dead_s = 600.0

    async def workflow(task: Any, model: flywheel.Model) -> float:
        scripted_engine.die()
        return await count(task, model)

    with pytest.raises(flywheel.errors.Away, match=r"no engine of .* has been in service for 3 s"):
        learn(explorer, tmp_path, workflow, TASKS[:1], timeout_s=3.0)


def test_a_task_at_which_the_engine_always_dies_is_a_failure_after_the_time(explorer, scripted_engine, tmp_path):
    scripted_engine.script.die_on_chat = True
    begun: list[Any] = []

    async def workflow(task: Any, model: flywheel.Model) -> float:
        begun.append(task)
        return await count(task, model)

    report = learn(explorer, tmp_path, workflow, TASKS[:1], timeout_s=3.0)
    assert (report.dropped, sum(report.failures.values())) == (1, 3)
    assert len(begun) > 3


def test_a_proxy_that_breaks_off_each_chat_is_named_while_its_runs_are_made_again(
    explorer, tmp_path, caplog, monkeypatch
):
    chats: list[str] = []
    end_when(monkeypatch, lambda: len(chats) > 2 * len(TASKS))
    json = {"Content-Type": "application/json"}

    def pass_on(_number: int, asked: Any) -> Any:
        if asked.path.endswith("/chat/completions"):
            chats.append(asked.path)
            return 504, {}, b"<html>Gateway Time-out</html>"
        found = explorer.http.request(asked.command, asked.path, content=asked.body, headers=json)
        return found.status_code, json, found.content

    with answering(pass_on) as url:
        report = learn(explorer, tmp_path, count, TASKS, url=url, seconds=0.1)
    assert (report.stopped, report.failures) == ("time", {})
    (named,) = [message for message in caplog.messages if "504" in message or "Gateway" in message]
    assert "no failure" in named


async def test_a_fault_of_the_agent_after_an_answer_is_no_outage(explorer):
    async with flywheel.AsyncClient(explorer.url) as client:
        run = client.run()
        assert not run.is_unanswered
        run.is_away = True
        await say_async(run.model)
        assert not run.is_unanswered
        run.child("a").is_away = True
        assert run.is_unanswered


@pytest.mark.parametrize(("status", "is_unanswered"), [(502, True), (503, True), (504, True), (500, False)])
async def test_a_proxy_that_reaches_no_explorer_is_an_outage(status, is_unanswered):
    proxy = answering(lambda *_: (status, {}, b"<html>Bad Gateway</html>"))
    with proxy as url:
        async with flywheel.AsyncClient(url) as client:
            run = client.run()
            with pytest.raises(openai.APIStatusError):
                await say_async(run.model)
            assert run.is_unanswered == is_unanswered
