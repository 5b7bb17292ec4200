"""The agent: AgentScope 1's ReActAgent with a calculator, written as in AgentScope's documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flywheel
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from examples.math import world

PROMPT = "Solve the problem with the calculator. End with the line Answer: and the number."
MOST_STEPS = 5


async def calculate(operation: str, a: float, b: float) -> ToolResponse:
    """Calculate with two numbers.

    Args:
        operation (str): add, subtract, multiply or divide.
        a (float): The first number.
        b (float): The second number.
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"= {world.calculate(operation, a, b)}")])


async def agent(task: Mapping[str, Any], model: flywheel.Model) -> dict[str, Any]:
    """Return the agent's answer and the number of its model calls."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculate)
    memory = InMemoryMemory()
    solver = ReActAgent(
        name="solver",
        sys_prompt=PROMPT,
        model=model.agentscope(),
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=memory,
        max_iters=MOST_STEPS,
    )
    solver.set_console_output_enabled(False)
    reply = await solver(Msg("user", task["question"], "user"))
    said = [one for one in await memory.get_memory() if one.role == "assistant"]
    return {"answer": reply.get_text_content() or "", "steps": len(said)}
