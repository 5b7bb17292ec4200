"""The support agent, on the OpenAI Agents SDK. It looks an order up, and refunds it or answers with a word.

A request is {"message": text, "office": URL}. The agent depends only on a model and on an office over HTTP.
"""

from __future__ import annotations

import functools
import ssl
from typing import Any

import flywheel
import httpx

PROMPT = (
    "You answer customers of a shop. Look the order up. Then either refund it and say refunded, or answer with one "
    "word: replace, wait, explain or decline."
)
MAX_TURNS = 4
MAX_TOKENS = 256  # of an answer


@functools.cache
def trust() -> ssl.SSLContext:
    """Return the trusted certificates. Cached: every new client would load them again."""
    return ssl.create_default_context()


async def support(request: dict[str, Any], model: flywheel.Model) -> str:
    """Return the reply to a customer."""
    from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    async with httpx.AsyncClient(base_url=request["office"], timeout=30, verify=trust()) as office:

        @flywheel.tool(read_only=True)
        async def lookup(order: str) -> str:
            """Read an order's record."""
            return (await office.get(f"/orders/{order}")).text

        @flywheel.tool(read_only=False)
        async def refund(order: str) -> str:
            """Pay an order back."""
            return (await office.post("/refunds", data={"order": order})).text

        agent = Agent(
            name="support",
            instructions=request.get("prompt", PROMPT),
            tools=[function_tool(tool, failure_error_function=None) for tool in (lookup, refund)],
            model=model.openai_agents(),
            model_settings=ModelSettings(max_tokens=request.get("max_tokens", MAX_TOKENS)),
        )
        result = await Runner.run(agent, request["message"], max_turns=MAX_TURNS)
        return str(result.final_output)
