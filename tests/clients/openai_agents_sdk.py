"""An agent on OpenAI's Agents SDK, over chat completions. It knows an OpenAI base URL and nothing of Flywheel.

python openai_agents_sdk.py BASE_URL RUNS — prints one final answer a line.
"""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{city}: sunny"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="unused")
    model = OpenAIChatCompletionsModel(model="agent", openai_client=client)
    agent = Agent(name="friday", instructions="You are a helpful assistant.", model=model, tools=[weather])
    runs = (Runner.run(agent, "What is the weather today?") for _ in range(int(sys.argv[2])))
    print("\n".join(result.final_output for result in await asyncio.gather(*runs)))


asyncio.run(main())
