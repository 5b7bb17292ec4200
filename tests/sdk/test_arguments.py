"""Which arguments a user's function gets, and which ones of a tool's call the policy and the recording see."""

from __future__ import annotations

import functools
import inspect
import json
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import flywheel
import pytest
from flywheel import tools
from flywheel.workflow import Caller

OFFERED = ("task", "model", "run")


def places(function: Any) -> tuple[tuple[int, ...], dict[str, int]]:
    return Caller(function, OFFERED, None).arguments(1, 2, 3)


@pytest.mark.parametrize(
    ("function", "by_position", "by_name"),
    [
        (lambda run, task: 0, (3, 1), {}),
        (lambda row, llm: 0, (1, 2), {}),
        (lambda llm, row, something: 0, (1, 2, 3), {}),
        (lambda model, row: 0, (2, 1), {}),
        (lambda task, *, seed=0: 0, (1,), {}),
        (lambda *everything: 0, (1, 2, 3), {}),
        (lambda row, model=None: 0, (1, 2), {}),
        (lambda task, verbose=False, model=None: 0, (1,), {"model": 2}),
        (lambda task, /, verbose=False, *, run: 0, (1,), {"run": 3}),
        (functools.partial(lambda task, system, model: 0, system="x"), (1,), {"model": 2}),
        (functools.partial(lambda system, task, model: 0, "x"), (1, 2), {}),
    ],
)
def test_a_function_gets_the_arguments_that_it_names_also_those_with_a_default(function, by_position, by_name):
    assert places(function) == (by_position, by_name)


@pytest.mark.parametrize(
    "function", [lambda a, b, c, d: 0, lambda task, *, seed: 0, lambda: 0, lambda verbose=False: 0]
)
def test_a_function_of_other_arguments_is_refused(function):
    with pytest.raises(flywheel.ConfigError, match="task, model, run"):
        places(function)


async def test_what_was_bound_and_what_is_offered_meet_in_one_call():
    said = functools.partial(lambda task, system, model: (task, system, model), system="be brief")
    assert await Caller(said, OFFERED, None)(1, 2, 3) == (1, "be brief", 2)


class Office:
    @flywheel.tool(read_only=False, name="refund_by_the_office")
    def refund(self, order: str) -> str:
        return f"refunded {order}"


def mcp(**arguments: Any) -> str:
    return f"refunded {arguments['order']}"


def invoked(ctx: object, input: str) -> str:
    return f"refunded {json.loads(input)['order']}"


def forward(self, order: str, note: str = "") -> str:  # type: ignore[no-untyped-def]
    return f"refunded {order}{note}"


def test_a_tool_s_function_with_a_self_that_nobody_passes_keeps_its_first_argument():
    name = f"refund-{uuid4().hex}"
    tool = SimpleNamespace(name=name, forward=functools.partial(forward, None))
    tool.forward.__signature__ = inspect.signature(forward)  # as smolagents' decorator makes it
    (guarded,) = flywheel.guard([tool])
    recorded: tools.Recording = []
    with tools.recorded_in(recorded):
        assert guarded.forward("A1", " late") == "refunded A1 late"
    assert recorded == [(name, '{"note": " late", "order": "A1"}', "refunded A1 late")]


def calls() -> dict[str, tuple[str, Any]]:
    """By kind, the name of a writing tool and a call of it for the order A1."""
    named = {name: f"refund-{name}-{uuid4().hex}" for name in ("kwargs", "json")}
    of_mcp = flywheel.tool(read_only=False, name=named["kwargs"])(mcp)
    (of_agents,) = flywheel.guard([SimpleNamespace(name=named["json"], on_invoke_tool=invoked)])
    return {
        "method": ("refund_by_the_office", lambda: Office().refund("A1")),
        "kwargs": (named["kwargs"], lambda: of_mcp(order="A1")),
        "json": (named["json"], lambda: of_agents.on_invoke_tool(object(), '{"order": "A1"}')),
    }


@pytest.mark.parametrize("kind", ["method", "kwargs", "json"])
def test_a_writing_call_is_recorded_and_answered_by_the_tool_s_own_arguments(kind):
    name, call = calls()[kind]
    recorded: tools.Recording = []
    with tools.recorded_in(recorded):
        assert call() == "refunded A1"
    assert recorded == [(name, '{"order": "A1"}', "refunded A1")]
    with flywheel.Client("http://127.0.0.1:9").run("t") as run:  # its guard is what a shadow run has
        for policy, answer in (
            (flywheel.RecordedTools(), "refunded A1"),
            (flywheel.SubstituteTools({name: lambda order: f"would refund {order}"}), "would refund A1"),
        ):
            run.guard = tools.ShadowGuard(run, policy, recorded)
            assert call() == answer
        assert run.attempts == [(name, {"order": "A1"})] * 2
        run.forget()


def test_arguments_that_are_no_json_reach_the_tool_and_the_recording_as_they_are():
    name = f"broken-{uuid4().hex}"
    (guarded,) = flywheel.guard([SimpleNamespace(name=name, on_invoke_tool=lambda ctx, input: "refused")])
    recorded: tools.Recording = []
    with tools.recorded_in(recorded):
        for text in ("{", "[]", ""):
            assert guarded.on_invoke_tool(None, text) == "refused"
    assert [said for _, said, _ in recorded] == ['{"input": "{"}', '{"input": "[]"}', "{}"]


def of_context(ctx: object, order: str) -> str:
    return f"refunded {order}"


def test_a_tool_that_calls_the_function_of_its_schema_is_guarded_there():
    name = f"refund-{uuid4().hex}"
    schema = SimpleNamespace(function=of_context, takes_ctx=True)  # as pydantic-ai has it
    (guarded,) = flywheel.guard([SimpleNamespace(name=name, function=of_context, function_schema=schema)])
    recorded: tools.Recording = []
    with tools.recorded_in(recorded):
        assert guarded.function_schema.function(object(), order="A1") == "refunded A1"
    assert recorded == [(name, '{"order": "A1"}', "refunded A1")]
    assert schema.function is of_context, "the program's own tool is as it was"


def test_a_tool_whose_schema_has_another_function_is_refused():
    name = f"refund-{uuid4().hex}"
    schema = SimpleNamespace(function=mcp, takes_ctx=False)
    with pytest.raises(flywheel.ConfigError, match="its function cannot be found"):
        flywheel.guard([SimpleNamespace(name=name, function=of_context, function_schema=schema)])
