"""The agent: one chat with the openai package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flywheel

PROMPT = "Solve the problem. End with #### and the number."


async def agent(task: Mapping[str, Any], model: flywheel.Model) -> str:
    """Return the model's answer."""
    async with model.async_openai() as client:
        reply = await client.chat.completions.create(
            model=model.name,
            messages=[{"role": "system", "content": PROMPT}, {"role": "user", "content": task["question"]}],
        )
    return reply.choices[0].message.content or ""
