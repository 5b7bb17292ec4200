"""Tools in shadow runs: an outside witness counts the writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import flywheel
import pytest
from flywheel import tools

from tests.sdk.conftest import rows, said, say_async
from tests.support.forms import FULL

RUNS = 40 if FULL else 15
_names = itertools.count()


class Witness:
    """Counts what was really done."""

    def __init__(self) -> None:
        self.refunds: list[str] = []
        self.reads = 0


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def name() -> Iterator[str]:
    """A tool's name that nothing was declared of."""
    yield f"refund_{next(_names)}"


def agent_with(function: Any, name: str, arguments: dict[str, Any], sees_error: bool = True) -> Any:
    """An agent that offers a tool and calls it when the model does; it shows errors to the model, as frameworks do."""
    offered = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}]

    async def agent(request: str, model: flywheel.Model | None) -> str:
        if model is None:  # production: its model calls the tool for A1
            return str(await function(order="A1"))
        messages: list[Any] = [{"role": "user", "content": request}]
        async with model.async_openai(max_retries=2) as openai:
            for _ in range(3):
                reply = await openai.chat.completions.create(model=model.name, messages=messages, tools=offered)
                message = reply.choices[0].message
                if not message.tool_calls:
                    return message.content or ""
                messages.append(message)
                for call in message.tool_calls:
                    try:
                        result = await function(**json.loads(call.function.arguments))
                    except Exception as exc:
                        if not sees_error:
                            raise
                        result = f"error: {exc}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        return "out of turns"

    return agent


def calls(scripted_engine: Any, name: str, **arguments: Any) -> None:
    """Let the model call a tool in every reply."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    scripted_engine.script.message = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def shadow(explorer: Any, agent: Any, policy: Any, seen: list[Any], runs: int = RUNS) -> flywheel.Stats:
    def score(run: flywheel.Run, reply: Any) -> float:
        seen.append((reply, list(run.attempts)))
        return 1.0

    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=flywheel.SamplingRate(1.0), tools=policy)
    serve = runner.watch(agent)

    async def all_of_them() -> None:
        await asyncio.gather(*(serve("please refund A1") for _ in range(runs)))

    with runner:
        asyncio.run(all_of_them())
    return runner.stats


POLICIES = [flywheel.ReadOnlyTools(), flywheel.RecordedTools(), flywheel.SubstituteTools({})]


@pytest.mark.parametrize("order", ["A1", "B2"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_declared_writing_tool_is_never_run_by_a_shadow(explorer, scripted_engine, witness, name, policy, order):
    @flywheel.tool(read_only=False, name=name)
    async def refund(order: str) -> str:
        witness.refunds.append(order)
        return f"refunded {order}"

    calls(scripted_engine, name, order=order)
    seen: list[Any] = []
    stats = shadow(explorer, agent_with(refund, name, {}), policy, seen)
    assert witness.refunds == ["A1"] * RUNS, "production's own"
    assert stats.runs == RUNS
    if isinstance(policy, flywheel.RecordedTools):
        assert stats.rewarded == RUNS
        attempts = 3 if order == "A1" else 1
        reply = "out of turns" if order == "A1" else None
        assert seen == [(reply, [(name, {"order": order})] * attempts)] * RUNS
        assert len(rows(explorer)) == RUNS * attempts, "the run ended at the call that production did not make"
    else:
        assert (stats.unsafe, stats.rewarded, seen) == (RUNS, 0, [])
        assert said(explorer) == []


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_tool_that_nobody_declared_stops_the_run_before_its_first_token(
    explorer, scripted_engine, witness, name, policy
):
    async def refund(order: str) -> str:
        witness.refunds.append(order)
        return "refunded"

    calls(scripted_engine, name, order="A1")
    stats = shadow(explorer, agent_with(refund, name, {}), policy, [])
    assert witness.refunds == ["A1"] * RUNS, "production's own"
    assert (stats.unsafe, scripted_engine.script.bodies) == (RUNS, [])
    assert f"flywheel.declare({name!r}" in (stats.last_error or "")


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_tool_that_its_framework_marks_read_only_obeys_its_function_s_declaration(
    explorer, scripted_engine, witness, name, policy
):
    @flywheel.tool(read_only=False, name=name)
    async def refund(order: str) -> str:
        witness.refunds.append(order)
        return "refunded"

    wrapped = flywheel.guard([SimpleNamespace(name=name, is_read_only=True, func=refund)])[0]
    assert tools.is_read_only(name) is False
    calls(scripted_engine, name, order="B2")
    shadow(explorer, agent_with(wrapped.func, name, {}), policy, [])
    assert witness.refunds == ["A1"] * RUNS


def test_the_witness_finds_a_hole(explorer, scripted_engine, witness, name):
    flywheel.declare(name, read_only=True)  # a writing tool that is declared to read: nobody can know better

    async def refund(order: str) -> str:
        witness.refunds.append(order)
        return "refunded"

    calls(scripted_engine, name, order="B2")
    shadow(explorer, agent_with(refund, name, {}), flywheel.ReadOnlyTools(), [], runs=1)
    assert "B2" in witness.refunds


def test_read_only_tools_run_and_substitutes_take_the_place_of_writing_ones(explorer, scripted_engine, witness, name):
    @flywheel.tool(read_only=True, name=f"{name}_lookup")
    async def lookup(order: str) -> str:
        witness.reads += 1
        return "found"

    calls(scripted_engine, f"{name}_lookup", order="A1")
    stats = shadow(explorer, agent_with(lookup, f"{name}_lookup", {}), flywheel.ReadOnlyTools(), [], runs=2)
    assert (stats.rewarded, witness.reads) == (2, 2 + 2 * 3)

    @flywheel.tool(read_only=False, name=name)
    async def refund(order: str) -> str:
        witness.refunds.append(order)
        return "refunded"

    faked: list[str] = []
    calls(scripted_engine, name, order="C3")

    def fake(order: str) -> str:
        faked.append(order)
        return "as if refunded"

    policy = flywheel.SubstituteTools({name: fake})
    assert shadow(explorer, agent_with(refund, name, {}), policy, [], runs=2).rewarded == 2
    assert (witness.refunds, set(faked)) == (["A1", "A1"], {"C3"})


def test_a_writing_call_never_leaves_the_transport_so_that_threads_without_a_context_run_none(
    explorer, scripted_engine, witness, name
):
    import threading

    @flywheel.tool(read_only=False, name=name)
    def refund(order: str) -> str:
        witness.refunds.append(order)
        return "refunded"

    async def in_a_bare_thread(order: str) -> str:
        thread = threading.Thread(target=refund, args=(order,))
        thread.start()
        thread.join()
        return "done"

    calls(scripted_engine, name, order="B2")
    stats = shadow(explorer, agent_with(in_a_bare_thread, name, {}), flywheel.ReadOnlyTools(), [], runs=4)
    assert (witness.refunds, stats.unsafe) == (["A1"] * 4, 4)


def test_a_program_cannot_be_started_in_a_shadow_run(explorer):
    async def agent(request: str, model: flywheel.Model | None) -> str:
        return "" if model is None else str(model.env())

    stats = shadow(explorer, agent, flywheel.ReadOnlyTools(), [], runs=1)
    assert stats.failed["ConfigError"] == 1
    assert "cannot be watched" in (stats.last_error or "")


@pytest.mark.parametrize(
    ("flags", "read_only"),
    [
        ({"is_read_only": True}, True),
        ({"is_read_only": False}, False),
        ({"annotations": SimpleNamespace(readOnlyHint=True)}, True),
        ({"annotations": SimpleNamespace(readOnlyHint=None)}, False),
        ({"metadata": {"read_only": True}}, True),
        ({"metadata": None}, False),
        ({"is_read_only": True, "annotations": SimpleNamespace(readOnlyHint=False)}, False),
    ],
)
def test_guard_reads_the_flags_of_frameworks(name, flags, read_only):
    flywheel.guard([SimpleNamespace(name=name, func=lambda: None, **flags)])
    assert tools.is_read_only(name) is read_only


class AsyncTool:
    async def __call__(self, order: str) -> str:
        return f"refunded {order}"


def test_what_a_tool_object_that_is_awaited_returned_is_recorded(name):
    token = tools.recording.set([])
    try:
        guarded = flywheel.tool(read_only=False, name=name)(AsyncTool())
        assert asyncio.run(guarded("A1")) == "refunded A1"
        assert tools.recording.get() == [(name, '{"order": "A1"}', "refunded A1")]
    finally:
        tools.recording.reset(token)


class AsyncAgent:
    """An agent that is an object: `await agent(request, model)`."""

    def __init__(self, tool: Any) -> None:
        self.tool = tool

    async def __call__(self, request: str, model: flywheel.Model | None) -> str:
        if model is not None:
            await say_async(model)
        return str(await self.tool("A1"))


def test_an_agent_object_that_is_awaited_is_watched_as_an_async_one(explorer, name):
    calls: list[Any] = []
    agent = AsyncAgent(flywheel.tool(read_only=False, name=name)(AsyncTool()))
    given: dict[str, Any] = {"tools": flywheel.RecordedTools(), "reward": lambda run, reply: 1.0}
    runner = flywheel.TrainingRunner(explorer.url, select=lambda call: calls.append(call.reply) or True, **given)
    with runner:
        assert asyncio.run(runner.watch(agent)("hello")) == "refunded A1"
    assert calls == ["refunded A1"]
    assert (runner.stats.rewarded, runner.stats.unsafe) == (1, 0), runner.stats


def test_guard_refuses_objects_that_it_cannot_guard(name):
    with pytest.raises(flywheel.ConfigError, match="its function cannot be found"):
        flywheel.guard([SimpleNamespace(name=name, is_read_only=True)])
    with pytest.raises(flywheel.ConfigError, match="has no name"):
        flywheel.guard([object()])


def test_what_cannot_be_recorded_reaches_production_and_is_logged(explorer, name, caplog):
    result = threading.Lock()  # no copy of it can be made
    opens = flywheel.tool(read_only=False, name=name)(lambda order: result)
    runner = flywheel.TrainingRunner(
        explorer.url, reward=lambda run, reply: 1.0, select=flywheel.SamplingRate(1.0), tools=flywheel.RecordedTools()
    )
    with runner:
        assert runner.watch(lambda request, model: opens("A1"))("hello") is result
    assert name in caplog.text
