"""An agent on langchain-openai, as its documentation writes one. It knows an OpenAI base URL and nothing of Flywheel.

python langchain_agent.py BASE_URL RUNS — prints one final answer a line.
"""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
async def weather(city: str) -> str:
    """Get the weather in a city."""
    return f"{city}: sunny"


async def run(model: ChatOpenAI, question: str) -> str:
    messages = [SystemMessage("You are a helpful assistant."), HumanMessage(question)]
    for _ in range(5):
        answer = await model.bind_tools([weather]).ainvoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [await weather.ainvoke(call) for call in answer.tool_calls]
    return messages[-1].text


async def main() -> None:
    model = ChatOpenAI(model="agent", base_url=sys.argv[1], api_key="unused", streaming=True)
    answers = await asyncio.gather(*(run(model, "What is the weather today?") for _ in range(int(sys.argv[2]))))
    print("\n".join(answers))


asyncio.run(main())
