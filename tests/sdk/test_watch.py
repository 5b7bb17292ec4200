"""Production's calls as a runner sees them: agents of several shapes, and marks in combined strategies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import flywheel
import pytest
from flywheel import selection

from tests.sdk.conftest import rows, say

EVERY = flywheel.SamplingRate(1.0)


@pytest.mark.parametrize("given", ["a function", "a conversation"])
def test_a_function_that_returns_a_coroutine_is_watched_until_that_has_ended(explorer, given):
    name, seen = f"refund-{uuid4().hex}", []

    @flywheel.tool(read_only=False, name=name)
    def refund(order: str) -> str:
        return f"refunded {order}"

    async def graph_agent(request: Any, model: flywheel.Model | None) -> str:
        await asyncio.sleep(0)
        if model is not None:
            await asyncio.to_thread(say, model)
        return refund("A1")

    def score(run: flywheel.Run, reply: str, call: flywheel.Call) -> float:
        seen.append((call.reply, reply))
        return 1.0

    given_options: dict[str, Any] = {"reward": score, "select": EVERY, "tools": flywheel.RecordedTools()}
    runner = flywheel.TrainingRunner(explorer.url, **given_options)

    def agent(request: Any, model: flywheel.Model | None) -> Any:  # not async
        return graph_agent(request, model)

    async def production() -> str:
        served = runner.watch(agent)("hello") if given == "a function" else runner.conversation(agent).say("hello")
        return str(await served)

    with runner:
        assert asyncio.run(production()) == "refunded A1"
    assert (runner.stats.rewarded, runner.stats.unsafe, dict(runner.stats.failed)) == (1, 0, {})
    assert seen == [("refunded A1", "refunded A1")]


def test_what_such_a_function_raises_is_raised_and_nothing_is_replayed(explorer):
    async def fails() -> str:
        raise KeyError("an error of production's own")

    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run: 1.0, select=EVERY)
    with runner, pytest.raises(KeyError, match="production's own"):
        asyncio.run(runner.watch(lambda request, model: fails())("hello"))
    assert (runner.stats.runs, dict(runner.stats.failed)) == (0, {})


def test_a_trainee_whose_model_has_a_default_gets_the_model(explorer):
    def agent(question: str, model: flywheel.Model | None = None) -> str:
        return "production" if model is None else str(say(model, question).choices[0].message.content)

    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run: 1.0, select=EVERY)
    with runner:
        assert runner.watch(agent)("hello") == "production"
    assert (runner.stats.rewarded, dict(runner.stats.failed)) == (1, {})


def test_a_mark_holds_for_the_calls_before_its_end_however_late_a_function_decides():
    mark = selection.Mark(("refund",), None, {}, at_s=time.monotonic() - 100)
    in_time = flywheel.Call("hello", mark=mark, at_s=mark.at_s + 59)
    strategy = flywheel.Marked(ttl_s=60) | (lambda call: False)
    assert asyncio.run(strategy.decide(in_time)) is not None
    assert asyncio.run(strategy.decide(replace(in_time, at_s=mark.at_s + 61))) is None


@pytest.mark.parametrize("model", [None, flywheel.Model.of("http://127.0.0.1:1/v1", "another", key="k")])
def test_calls_within_an_evaluation_are_not_production(explorer, model):
    async def part(request: Any, model: flywheel.Model | None) -> float:
        if model is not None:
            await asyncio.to_thread(say, model)
        return 1.0

    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run, reply: 1.0, select=EVERY)
    serve = runner.watch(part)

    async def whole(task: Any) -> float:
        return float(await serve(task))

    with runner:
        assert flywheel.evaluate(whole, [{"text": "t"}], url=explorer.url, model=model).mean == 1.0
    assert (runner.stats.seen, rows(explorer)) == (0, [])


def test_production_is_served_where_the_shadow_thread_cannot_start(explorer, monkeypatch, caplog):
    def fails(main: Any) -> None:
        main.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("flywheel.shadow.asyncio.run", fails)
    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run, reply: 1.0, select=EVERY)
    serve = runner.watch(lambda request, model: f"reply to {request}")
    runner.start()
    assert serve("hello") == "reply to hello"
    runner.commit()
    runner.stop()
    assert (runner.stats.seen, runner.stats.dropped) == (1, 1)
    assert "Too many open files" in caplog.text
