"""What a reward function of TrainingRunner is told."""

from __future__ import annotations

import asyncio
from typing import Any

import flywheel

from tests.sdk.conftest import say, say_async
from tests.sdk.test_runner import PRODUCTION, agent, ask


def test_a_reward_may_compare_the_trainee_s_reply_with_the_request_and_production_s_reply(explorer):
    seen = []

    def compares(run: flywheel.Run, reply: str, call: flywheel.Call) -> float:
        seen.append((call.request["text"], call.reply))
        return float(reply == call.reply)

    runner = flywheel.TrainingRunner(explorer.url, agent, compares, select=flywheel.SamplingRate(1.0))
    with runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert seen == [("t0", "production: t0")]
    assert (runner.stats.rewarded, runner.stats.reward_mean) == (1, 0.0)


def test_a_reward_gets_the_request_as_it_was_though_the_trainee_changes_its_own(explorer):
    seen: list[Any] = []

    def changes(request: dict[str, Any], model: flywheel.Model) -> str:
        say(model)
        return str(request.pop("text"))

    def looks(run: flywheel.Run, reply: str, call: flywheel.Call) -> float:
        seen.append(call.request["text"])
        return 1.0

    with flywheel.TrainingRunner(explorer.url, changes, looks, select=flywheel.SamplingRate(1.0)) as runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert seen == ["t0"]


def test_metrics_that_the_explorer_weights_count_with_the_reward_that_it_makes_of_them(explorer):
    rule = flywheel.rewards.Weighted({"right": 3.0}, rule="server")
    right, all_calls = rule({"right": 1.0}), flywheel.SamplingRate(1.0)
    with flywheel.TrainingRunner(explorer.url, agent, lambda run, reply: right, select=all_calls) as runner:
        ask(runner.watch(agent, production=PRODUCTION), 2)
    stats = runner.stats
    assert (stats.rewarded, stats.reward_mean, stats.unrewarded, stats.committed) == (2, 3.0, 0, 2)


def test_a_reward_function_may_ask_a_version_about_a_run_that_ended_at_a_tool(explorer):
    refund = flywheel.tool(read_only=False, name="refund_with_a_judge")(lambda order: f"refunded {order}")

    async def agent(request: str, model: flywheel.Model | None) -> str:
        if model is not None:
            await say_async(model)
        return str(refund("A1" if model is None else "B2"))

    with flywheel.Client(explorer.url) as client:
        judge = client.model(0).untrained()

        async def reward(run: flywheel.Run, reply: Any) -> float:
            await say_async(judge)
            return -1.0

        given: dict[str, Any] = {"tools": flywheel.RecordedTools(), "select": flywheel.SamplingRate(1.0)}
        with flywheel.TrainingRunner(explorer.url, reward=reward, **given) as runner:
            asyncio.run(runner.watch(agent)("please refund A1"))
    assert (runner.stats.rewarded, dict(runner.stats.failed)) == (1, {})


def test_what_an_agent_leaves_running_is_still_guarded_while_its_reward_is_found(explorer):
    left, is_judged = list[asyncio.Task[Any]](), asyncio.Event()
    undeclared = {"type": "function", "function": {"name": "nobody_declared_this", "parameters": {}}}

    async def later(model: flywheel.Model) -> None:
        await is_judged.wait()
        async with model.async_openai(max_retries=0) as openai:
            await openai.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "hi"}], tools=[undeclared]
            )

    async def agent(request: str, model: flywheel.Model | None) -> str:
        if model is not None:
            await say_async(model)
            left.append(asyncio.create_task(later(model)))
        return "done"

    async def reward(run: flywheel.Run, reply: Any) -> float:
        is_judged.set()
        await asyncio.wait(left)
        return 1.0

    select = flywheel.SamplingRate(1.0)
    with flywheel.TrainingRunner(explorer.url, reward=reward, select=select, tools=flywheel.RecordedTools()) as runner:
        asyncio.run(runner.watch(agent)("hello"))
    assert "nobody_declared_this" in repr(left[0].exception())
