"""Shadow runs of an agent with a writing tool, and an outside witness: a server that counts refunds.

The tool is declared, undeclared or wrongly declared by its framework, and each policy has to keep it from running. A
short form runs in CI; FLYWHEEL_TORTURE=full makes 2,000 shadow runs for each.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import flywheel
import pytest

from tests.sdk.test_tools import agent_with, calls
from tests.sdk.witness import Witness, witnessing
from tests.support.forms import FULL

RUNS = 2000 if FULL else 15
POLICIES = [flywheel.ReadOnlyTools(), flywheel.RecordedTools(), flywheel.SubstituteTools({})]
_names = itertools.count()


@pytest.fixture
def witness() -> Iterator[Witness]:
    with witnessing() as found:
        yield found


def writing(witness: Witness, name: str) -> Callable[..., Any]:
    """A tool that writes. Only shadow runs call it for B2."""

    async def refund(order: str) -> str:
        return witness.refund(order)

    refund.__name__ = name
    return refund


def declared(witness: Witness, name: str) -> Callable[..., Any]:
    return flywheel.tool(read_only=False, name=name)(writing(witness, name))


def undeclared(witness: Witness, name: str) -> Callable[..., Any]:
    return writing(witness, name)


def wrongly_declared(witness: Witness, name: str) -> Callable[..., Any]:
    """Its framework says that it only reads; its function says that it writes."""
    function = declared(witness, name)
    return flywheel.guard([SimpleNamespace(name=name, is_read_only=True, func=function)])[0].func  # type: ignore[no-any-return]


def without_flags(witness: Witness, name: str) -> Callable[..., Any]:
    """Its framework says nothing, which counts as writing."""
    return flywheel.guard([SimpleNamespace(name=name, func=writing(witness, name))])[0].func  # type: ignore[no-any-return]


def shadow(explorer: Any, function: Any, name: str, policy: flywheel.ReadOnlyTools, runs: int) -> flywheel.Stats:
    """So many shadow runs whose model refunds B2, where production refunded A1."""
    agent = agent_with(function, name, {})
    runner = flywheel.TrainingRunner(
        explorer.url, agent, lambda run, reply: 1.0, select=flywheel.SamplingRate(1.0), tools=policy, queue=runs
    )
    serve = runner.watch(agent)

    async def all_of_them() -> None:
        for _ in range(runs):
            await serve("please refund A1")

    runner.start()
    asyncio.run(all_of_them())
    runner.stop(drain_s=300.0)
    return runner.stats


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kind", [declared, undeclared, wrongly_declared, without_flags], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_the_witness_sees_no_write_of_a_shadow_run(explorer, scripted_engine, witness, policy, kind):
    name = f"witnessed_{next(_names)}"
    function = kind(witness, name)
    calls(scripted_engine, name, order="B2")
    stats = shadow(explorer, function, name, policy, RUNS)
    assert witness.refunds == {"A1": RUNS}, "production's own, and nothing else"
    assert (stats.runs, stats.dropped) == (RUNS, 0)
    ended_as_attempts = isinstance(policy, flywheel.RecordedTools) and kind is not undeclared
    assert (stats.rewarded, stats.unsafe) == ((RUNS, 0) if ended_as_attempts else (0, RUNS))


def test_the_witness_finds_a_planted_hole(explorer, scripted_engine, witness):
    """A tool that writes and is declared to read: nobody can know better, so the witness has to see it."""
    name = f"witnessed_{next(_names)}"
    flywheel.declare(name, read_only=True)
    calls(scripted_engine, name, order="B2")
    shadow(explorer, writing(witness, name), name, flywheel.ReadOnlyTools(), 5)
    assert witness.refunds["B2"] > 0
