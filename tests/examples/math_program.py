"""Run with 1 or 2: the math example's agent of that line of AgentScope against a scripted server."""

from __future__ import annotations

import asyncio
import sys

import flywheel

from examples.math import tiny
from examples.math.__main__ import example
from examples.math.reward import reward
from examples.math.world import make_problem
from tests.examples.stub import call, longest_prompt, stub

LINE = int(sys.argv[1])
found = example(LINE)
agent = found.workflow
assert not {one["question"] for one in found.tasks} & {one["question"] for one in found.held_out}
assert len(found.held_out) == 200
problem = make_problem(1)
task = {"question": problem.question, "answer": problem.answer}


def solve(body: dict) -> dict:
    """One call, then its result as the answer."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": f"Answer: {last['content'].removeprefix('= ')}"}
    return call("calculate", len(body["messages"]), operation=problem.operation, a=problem.a, b=problem.b)


def never_end(body: dict) -> dict:
    """Call after call, as long as there are tools."""
    if not body.get("tools"):
        return {"content": "I do not know."}
    return call("calculate", len(body["messages"]), operation="fly", a=0, b=0)


def text(message: dict) -> str:
    """The text of a message, whose content may be in parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content or [])


with stub(solve) as (url, bodies):
    reply = asyncio.run(agent(task, flywheel.Model.of(url, "agent", key="unused")))
assert reply == {"answer": f"Answer: {problem.answer}", "steps": 2}, reply
assert reward(task, reply).value == 3.3
assert longest_prompt(bodies) < 4096
assert text(bodies[0]["messages"][0]) == tiny.PROMPT

# what the warm start shows is what the agent says
shown = tiny._conversation(tiny.DEMONSTRATED, LINE, (1,)).messages
said = bodies[-1]["messages"]
assert [one["role"] for one in said] == [one["role"] for one in shown][: len(said)]
assert set(bodies[0]["tools"][0]["function"]["parameters"]["properties"]) == {"operation", "a", "b"}

with stub(never_end) as (url, bodies):
    reply = asyncio.run(agent(task, flywheel.Model.of(url, "agent", key="unused")))
assert len(bodies) <= 6
assert reward(task, reply).value <= -0.4
