"""AgentScope's ReActAgent, streaming, as its documentation writes one. It knows a base URL and nothing of Flywheel.

python agentscope_react.py BASE_URL RUNS — prints one final answer a line.
"""

import asyncio
import sys

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse


async def weather(city: str) -> ToolResponse:
    """Get the weather in a city.

    Args:
        city (str): The name of the city.
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"{city}: sunny")])


async def run(question: str) -> str:
    toolkit = Toolkit()
    toolkit.register_tool_function(weather)
    agent = ReActAgent(
        name="Friday",
        sys_prompt="You are a helpful assistant named Friday.",
        model=OpenAIChatModel(
            model_name="agent", api_key="unused", stream=True, client_kwargs={"base_url": sys.argv[1]}
        ),
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=InMemoryMemory(),
    )
    agent.set_console_output_enabled(False)
    return (await agent(Msg("user", question, "user"))).get_text_content()


async def main() -> None:
    print("\n".join(await asyncio.gather(*(run("What is the weather today?") for _ in range(int(sys.argv[2]))))))


asyncio.run(main())
