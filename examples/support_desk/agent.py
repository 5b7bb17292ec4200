"""The agent: a plain program on the official `openai` package. It has a base URL and is independent of Flywheel."""

from __future__ import annotations

from openai import AsyncOpenAI

INSTRUCTION = "desk , priority"


def messages(ticket: str) -> list[dict[str, str]]:
    """Return the messages that begin the conversation about a ticket."""
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": ticket}]


class SupportAgent:
    """Asks the model to which desk a ticket belongs, and how urgent it is."""

    def __init__(self, base_url: str, model: str = "agent") -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=60)
        self._model = model

    async def route(self, ticket: str) -> tuple[str, str]:
        """Return the message's id and the model's answer."""
        reply = await self._client.chat.completions.create(
            model=self._model,
            messages=messages(ticket),  # type: ignore[arg-type]  # plain dicts are what its TypedDicts are
            max_tokens=12,
            temperature=1.0,
        )
        return reply.id, reply.choices[0].message.content or ""

    async def close(self) -> None:
        await self._client.close()
