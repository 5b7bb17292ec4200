"""flywheel.guard on tools of real frameworks: python guard_program.py prints what it read and what ran.

It runs in the clients' environment with agent_sdk on its path. `wrote` counts what a writing tool really did.
"""

import asyncio
import json
from types import SimpleNamespace

import flywheel
from flywheel.tools import ReadOnlyTools, ShadowGuard, is_read_only, recorded_in
from flywheel.transport import current_run

wrote = []


def make(name):
    async def tool(order: str) -> str:
        """Does something to an order.

        Args:
            order: Its number.
        """
        wrote.append(name)
        return "done"

    tool.__name__ = name
    return tool


def sync(name):
    def tool(order: str) -> str:
        """Does something to an order.

        Args:
            order: Its number.
        """
        wrote.append(name)
        return "done"

    tool.__name__ = name
    return tool


def agentscope(name, read_only):
    from agentscope.tool import FunctionTool

    (tool,) = flywheel.guard([FunctionTool(make(name), is_read_only=read_only)])

    async def call():
        result = await tool(order="A1")
        if hasattr(result, "__aiter__"):
            [_ async for _ in result]

    return tool, call


def langchain(name, read_only):
    from langchain_core.tools import StructuredTool

    made = StructuredTool.from_function(coroutine=make(name), name=name, metadata={"read_only": read_only})
    (tool,) = flywheel.guard([made])
    return tool, lambda: tool.ainvoke({"order": "A1"})


def openai_agents(name, read_only):
    from agents import function_tool
    from agents.tool_context import ToolContext

    function = flywheel.tool(read_only=read_only, name=name)(make(name))
    tool = function_tool(function, failure_error_function=None)

    async def call():
        context = ToolContext(None, tool_name=name, tool_call_id="c", tool_arguments='{"order": "A1"}')
        await tool.on_invoke_tool(context, '{"order": "A1"}')

    return tool, call


def smolagents(name, read_only):
    from smolagents import tool as as_tool

    made = as_tool(weather_like) if read_only else as_tool(writing_like)
    made.is_read_only = read_only
    made.name = name
    (tool,) = flywheel.guard([made])

    async def call():
        tool.forward(order="A1")

    return tool, call


def pydantic_ai(name, read_only):
    from pydantic_ai import Agent, RunContext, Tool
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    async def of_context(ctx: RunContext[None], order: str) -> str:
        assert isinstance(ctx, RunContext)
        return await make(name)(order)

    def respond(messages, info):
        return ModelResponse(parts=[ToolCallPart(name, {"order": "A1"}) if len(messages) == 1 else TextPart("done")])

    (tool,) = flywheel.guard([Tool(of_context, name=name, metadata={"read_only": read_only})])
    agent = Agent(FunctionModel(respond), tools=[tool])
    return tool, lambda: agent.run("x")


def weather_like(order: str) -> str:
    """Reads an order.

    Args:
        order: Its number.
    """
    wrote.append("smolagents_reads")
    return "done"


def writing_like(order: str) -> str:
    """Writes an order.

    Args:
        order: Its number.
    """
    wrote.append("smolagents_writes")
    return "done"


async def within_shadow(call):
    """What a call does in a shadow run."""
    run = SimpleNamespace(attempts=[])
    run.guard = ShadowGuard(run, ReadOnlyTools(), [])
    token = current_run.set(run)
    try:
        await call()
    except flywheel.UnsafeTool:
        return "refused"
    except Exception as exc:  # noqa: BLE001 — a framework may wrap it
        return "refused" if run.guard.unsafe else repr(exc)
    finally:
        current_run.reset(token)
    return "refused and hidden" if run.guard.unsafe else "ran"


async def main():
    found = {}
    for framework in (agentscope, langchain, openai_agents, pydantic_ai, smolagents):
        for read_only in (True, False):
            name = f"{framework.__name__}_{'reads' if read_only else 'writes'}"
            _, call = framework(name, read_only)
            before = wrote.count(name)
            shadow = await within_shadow(call)
            during = wrote.count(name) - before
            recorded = []
            with recorded_in(recorded):
                await call()
            arguments = [json.loads(said) for _, said, _ in recorded]
            found[name] = [is_read_only(name), shadow, during, wrote.count(name) - before - during, arguments]
    print(json.dumps(found))


asyncio.run(main())
