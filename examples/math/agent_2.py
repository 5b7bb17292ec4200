"""The same agent with AgentScope 2: an Agent with a calculator, written as in its documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flywheel
from agentscope.agent import Agent, ReActConfig
from agentscope.message import UserMsg
from agentscope.tool import FunctionTool, Toolkit

from examples.math import world

PROMPT = "Solve the problem with the calculator. End with the line Answer: and the number."
MOST_STEPS = 5


async def calculate(operation: str, a: float, b: float) -> str:
    """Calculate with two numbers.

    Args:
        operation (str): add, subtract, multiply or divide.
        a (float): The first number.
        b (float): The second number.
    """
    return f"= {world.calculate(operation, a, b)}"


async def agent(task: Mapping[str, Any], model: flywheel.Model) -> dict[str, Any]:
    """Return the agent's answer and the number of its model calls."""
    solver = Agent(
        name="solver",
        system_prompt=PROMPT,
        model=model.agentscope(),
        toolkit=Toolkit(tools=[FunctionTool(calculate, is_read_only=True)]),
        react_config=ReActConfig(max_iters=MOST_STEPS),
    )
    reply = await solver.reply(UserMsg("user", task["question"]))
    return {"answer": reply.get_text_content() or "", "steps": solver.state.reply_context.cur_iter}
