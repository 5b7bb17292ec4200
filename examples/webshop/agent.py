"""The shoppers: one uses the OpenAI Agents SDK with tools, the other is a loop over plain text.

Both depend only on a model and a shop's URL. A request is {"shop": URL, "session": name, "instruction": text}.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from flywheel import Model, is_context_full

TOOLS_PROMPT = "You shop online. Search, open a product, choose each option that is asked for, then click buy now."
LOOP_PROMPT = (
    "You shop online. Say one action at a time: search[words] or click[label]. Labels are what stands in brackets, and "
    "the values of options. Open a product, choose each option that is asked for, then click[buy now]."
)
MAX_TURNS = 30  # the shop closes before, after 15 possible or 15 impossible actions
MAX_TOKENS = 256  # of an answer


@functools.cache
def trust() -> ssl.SSLContext:
    """Return the trusted certificates. Cached: every new client would load them again."""
    return ssl.create_default_context()


@dataclass
class Browser:
    """Visits a shop over HTTP. Actions are done one at a time, in the order in which they were asked for."""

    http: httpx.AsyncClient
    path: str
    done: bool = False
    page: str = ""  # the last one, as text
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # the SDK starts all calls of a reply at once

    async def act(self, action: str) -> str:
        """Do an action. Returns the page as text."""
        async with self._lock:
            reply = await self.http.post(self.path, data={"action": action}, headers={"Accept": "application/json"})
            page = reply.raise_for_status().json()
            self.done, self.page = page["done"], str(page["text"])
            return self.page


@contextlib.contextmanager
def until_context_is_full(browser: Browser) -> Iterator[None]:
    """End the block without an error where the history of the visit fills the model's context."""
    import openai

    try:
        yield
    except openai.BadRequestError as error:
        if not browser.page or not is_context_full(error):
            raise


async def shop_by_loop(
    request: dict[str, str], model: Model, prompt: str = LOOP_PROMPT, max_tokens: int = MAX_TOKENS
) -> str:
    """Shop in a plain loop: the model's text is the action, the page is the next message. Returns the last page."""
    client = model.async_openai()
    messages: list[Any] = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": f"{request['instruction']}\nsearch[words]"},
    ]
    async with httpx.AsyncClient(base_url=request["shop"], timeout=60, verify=trust()) as http:
        browser = Browser(http, f"/s/{request['session']}")
        with until_context_is_full(browser):
            for _ in range(MAX_TURNS):
                reply = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=max_tokens)
                said = reply.choices[0].message.content or ""
                page = await browser.act(said)
                if browser.done:
                    break
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": page}]
    return browser.page


async def shop_by_tools(
    request: dict[str, str], model: Model, prompt: str = TOOLS_PROMPT, max_tokens: int = MAX_TOKENS
) -> str:
    """Shop with the OpenAI Agents SDK. The run ends with the purchase. Returns the last page."""
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelBehaviorError,
        ModelSettings,
        Runner,
        ToolsToFinalOutputResult,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    async with httpx.AsyncClient(base_url=request["shop"], timeout=60, verify=trust()) as http:
        browser = Browser(http, f"/s/{request['session']}")

        async def search(words: str) -> str:
            """Search the shop."""
            return await browser.act(f"search[{words}]")

        async def click(label: str) -> str:
            """Click a label of the page."""
            return await browser.act(f"click[{label}]")

        def until_done(_: Any, results: list[Any]) -> Any:
            return ToolsToFinalOutputResult(is_final_output=browser.done, final_output=str(results[-1].output))

        shopper = Agent(
            name="shopper",
            instructions=prompt,
            tools=[function_tool(search), function_tool(click)],
            model=model.openai_agents(),
            model_settings=ModelSettings(max_tokens=max_tokens),
            tool_use_behavior=until_done,
        )
        # the SDK ends a run in which the model calls a tool that does not exist
        with until_context_is_full(browser), contextlib.suppress(MaxTurnsExceeded, ModelBehaviorError):
            await Runner.run(shopper, request["instruction"], max_turns=MAX_TURNS)
    return browser.page
