"""An agent on LiteLLM's SDK. It knows an OpenAI base URL and nothing of Flywheel.

python litellm_agent.py BASE_URL RUNS — prints one final answer a line.
"""

import asyncio
import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


async def run(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(5):
        reply = await litellm.acompletion(
            "openai/agent", messages, tools=[TOOL], api_base=sys.argv[1], api_key="unused"
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    return messages[-1].content


async def main() -> None:
    print("\n".join(await asyncio.gather(*(run("What is the weather today?") for _ in range(int(sys.argv[2]))))))


asyncio.run(main())
