"""AgentScope 2's Agent, streaming, as its documentation writes one. It knows a base URL and nothing of Flywheel.

python agentscope_agent.py BASE_URL RUNS — prints one final answer a line.
"""

import asyncio
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit


async def weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city (str): The name of the city.
    """
    return f"{city}: sunny"


async def run(question: str) -> str:
    agent = Agent(
        name="Friday",
        system_prompt="You are a helpful assistant named Friday.",
        model=OpenAIChatModel(OpenAICredential(api_key="unused", base_url=sys.argv[1]), model="agent"),
        toolkit=Toolkit(tools=[FunctionTool(weather, is_read_only=True)]),
    )
    return (await agent.reply(UserMsg("user", question))).get_text_content()


async def main() -> None:
    print("\n".join(await asyncio.gather(*(run("What is the weather today?") for _ in range(int(sys.argv[2]))))))


asyncio.run(main())
