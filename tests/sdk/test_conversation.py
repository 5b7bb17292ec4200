"""Conversations: replayed turn by turn on the recorded history, or as a whole with a user."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import flywheel
import pytest

from tests.sdk.conftest import rows, say_async

ALWAYS = flywheel.SamplingRate(1.0)


async def agent(messages: list[Any], model: flywheel.Model | None) -> str:
    """Production answers by itself; the trainee asks its model with the whole history."""
    if model is None:
        return f"production {len(messages)}"
    async with model.async_openai(max_retries=0) as openai:
        reply = await openai.chat.completions.create(model=model.name, messages=messages)
    return reply.choices[0].message.content or ""


def talk(explorer: Any, reward: Any, **options: Any) -> flywheel.TrainingRunner:
    """Three turns of a person with production."""
    runner = flywheel.TrainingRunner(explorer.url, agent, reward, select=ALWAYS)
    chat = runner.conversation(agent, **options)

    async def turns() -> list[str]:
        return [await chat.say(text) for text in ("hello", "and then?", "thanks")]

    with runner:
        assert asyncio.run(turns()) == ["production 1", "production 3", "production 5"]
        chat.end()
    return runner


def asked(scripted_engine: Any) -> list[list[str]]:
    """What the messages of each chat said, the shortest first."""
    bodies = [[message["content"] for message in body["messages"]] for body in scripted_engine.script.bodies]
    return sorted(bodies, key=len)


def test_each_turn_is_replayed_on_the_recorded_history(explorer, scripted_engine):
    runner = talk(explorer, lambda run, reply: 0.5)
    assert (runner.stats.seen, runner.stats.rewarded) == (3, 3)
    first = ["hello", "production 1", "and then?", "production 3", "thanks"]
    assert asked(scripted_engine) == [first[:1], first[:3], first]
    assert len({row.task_id for row in rows(explorer)}) == 3


def test_the_whole_is_replayed_with_the_recorded_messages_of_the_person(explorer, scripted_engine):
    seen: list[Any] = []
    runner = talk(explorer, lambda run, reply: seen.append(reply) or 0.5, user="recorded")
    assert (runner.stats.seen, runner.stats.rewarded) == (1, 1)
    roles = [message["role"] for message in seen[0]]
    assert roles == ["user", "assistant"] * 3
    assert [message["content"] for message in seen[0][::2]] == ["hello", "and then?", "thanks"]
    assert "production" not in json.dumps(asked(scripted_engine)), "the trainee's own replies are the history"
    assert {(row.task_id, row.run_id, row.reward) for row in rows(explorer)} == {(rows(explorer)[0].task_id, "0", 0.5)}
    assert len(rows(explorer)) == 3


def test_a_function_may_play_the_person_and_end_the_conversation(explorer):
    def user(messages: list[Any], recorded: list[Any]) -> str | None:
        return None if len(messages) >= 4 else f"{recorded[0]['content']} {len(messages)}"

    seen: list[Any] = []
    talk(explorer, lambda run, reply: seen.append(reply) or 1.0, user=user)
    assert [message["content"] for message in seen[0][::2]] == ["hello 0", "hello 2"]
    talk(explorer, lambda run, reply: seen.append(reply) or 1.0, user=lambda messages, recorded: "more", turns=2)
    assert len(seen[1]) == 4


@pytest.mark.parametrize("params", [None, {}, {"temperature": 0.5}])
def test_a_simulated_user_asks_a_model_whose_chats_are_not_recorded(explorer, scripted_engine, params):
    with flywheel.Client(explorer.url) as client:
        by_address = flywheel.Model.of(f"{explorer.url}/v1", "agent@0", key="k", **(params or {}))
        user = flywheel.SimulatedUser(client.model(0) if params is None else by_address)
        runner = talk(explorer, lambda run, reply: 1.0, user=user, turns=2)
    assert runner.stats.rewarded == 1, runner.stats
    assert len(rows(explorer)) == 2, "the trainee's two turns"
    assert {(row.run_id, row.reward) for row in rows(explorer)} == {("0", 1.0)}
    played = [body["messages"] for body in scripted_engine.script.bodies if body["messages"][0]["role"] == "system"]
    assert [[message["role"] for message in messages] for messages in played] == [["system", "assistant", "user"]]
    assert "user: and then?" in played[0][0]["content"]


def test_a_simulated_user_that_answers_end_ends_it(explorer, scripted_engine):
    scripted_engine.script.message = {"content": "END"}
    user = flywheel.SimulatedUser(flywheel.Model.of(f"{scripted_engine.url}/v1", "agent", key="k"))
    seen: list[Any] = []
    talk(explorer, lambda run, reply: seen.append(reply) or 1.0, user=user)
    assert len(seen[0]) == 2


def test_a_writing_tool_in_a_replayed_conversation_gets_production_s_result(explorer, scripted_engine):
    done: list[str] = []

    @flywheel.tool(read_only=False, name="cancel_order")
    async def cancel(order: str) -> str:
        done.append(order)
        return f"cancelled {order}"

    async def cancelling(messages: list[Any], model: flywheel.Model | None) -> str:
        if model is not None:
            await say_async(model)
        return await cancel("A1")

    seen: list[Any] = []

    def score(run: flywheel.Run, reply: Any) -> float:
        seen.append(reply[-1]["content"])
        return 1.0

    runner = flywheel.TrainingRunner(explorer.url, None, score, select=ALWAYS, tools=flywheel.RecordedTools())
    with runner:
        chat = runner.conversation(cancelling, user="recorded")
        assert asyncio.run(chat.say("cancel it")) == "cancelled A1"
        chat.end()
    assert (done, seen) == (["A1"], ["cancelled A1"]), runner.stats


def test_a_sync_agent_has_conversations_too(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, lambda run, reply: 1.0, select=ALWAYS)
    with runner:
        for user in (None, "recorded"):
            chat = runner.conversation(lambda messages, model: {"role": "assistant", "content": "p"}, user=user)
            assert chat.say("hello") == {"role": "assistant", "content": "p"}
            chat.end()
    assert (runner.stats.seen, runner.stats.rewarded) == (2, 2)


def calls_async(messages: list[Any], model: flywheel.Model | None) -> Any:
    return agent(messages, model)


class AsyncAgent:
    async def __call__(self, messages: list[Any], model: flywheel.Model | None) -> str:
        return await agent(messages, model)


@pytest.mark.parametrize("user", [None, "recorded"])
@pytest.mark.parametrize("awaited", [AsyncAgent(), calls_async])
def test_an_agent_that_is_awaited_without_being_a_coroutine_function_has_conversations_too(explorer, user, awaited):
    runner = flywheel.TrainingRunner(explorer.url, agent, lambda run, reply: 1.0, select=ALWAYS)
    chat = runner.conversation(awaited, user=user)

    async def turns() -> list[str]:
        return [await chat.say(text) for text in ("hello", "thanks")]

    assert asyncio.run(turns()) == ["production 1", "production 3"]
    assert [message["content"] for message in chat.messages] == ["hello", "production 1", "thanks", "production 3"]


@pytest.mark.parametrize("user", [None, "recorded"])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_history_holds_the_replies_and_not_what_an_agent_appends_to_its_messages(user, is_async):
    def appends(messages: list[Any], model: flywheel.Model | None) -> str:
        seen.append([message["role"] for message in messages])
        messages += [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "42"}]
        return f"production {len(seen)}"

    async def asynchronous(messages: list[Any], model: flywheel.Model | None) -> str:
        return appends(messages, model)

    async def turns() -> list[str]:
        return [await chat.say(text) for text in ("hello", "thanks")]

    seen: list[list[str]] = []
    runner = flywheel.TrainingRunner("http://127.0.0.1:1", reward=lambda run, reply: 1.0, select=ALWAYS)
    chat = runner.conversation(asynchronous if is_async else appends, user=user)
    said = asyncio.run(turns()) if is_async else [chat.say(text) for text in ("hello", "thanks")]
    assert said == ["production 1", "production 2"]
    assert [message["content"] for message in chat.messages] == ["hello", "production 1", "thanks", "production 2"]
    assert seen == [["user"], ["user", "assistant", "user"]]


@pytest.mark.parametrize("wrong", [{"user": "simulated"}, {"turns": 0}])
def test_a_wrong_option_of_a_conversation_is_named(wrong):
    runner = flywheel.TrainingRunner("http://127.0.0.1:1", agent, lambda run, reply: 1.0)
    with pytest.raises(flywheel.ConfigError, match=next(iter(wrong))):
        runner.conversation(agent, **wrong)


def test_a_last_reply_without_content_is_no_error_of_production(explorer):
    calls_a_tool = {"role": "assistant", "tool_calls": []}
    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run, reply: None, select=flywheel.SamplingRate(1.0))
    chat = runner.conversation(lambda messages, model: calls_a_tool, user="recorded")
    with runner:
        assert chat.say("hello") == calls_a_tool
        chat.end()
    assert runner.stats.seen == 1


def test_a_simulated_user_of_the_explorer_uses_no_proxy(explorer, monkeypatch):
    monkeypatch.setattr("flywheel.connections._LOOPBACK", ())  # as if the explorer were on another machine
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with flywheel.Client(explorer.url) as client:
        user = flywheel.SimulatedUser(client.model(0))
        assert talk(explorer, lambda run, reply: 1.0, user=user, turns=2).stats.rewarded == 1
