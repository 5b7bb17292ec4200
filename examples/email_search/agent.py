"""The email agent, built on LangGraph with LangChain's create_agent. It depends only on a model and three tools.

A request is {"question": text, "inbox": address, "today": date, "mail": a Visit: the three tools and the record of
their calls}.
"""

from __future__ import annotations

import json
from typing import Any

from flywheel import Model, is_context_full

PROMPT = (
    "You answer questions about the mail of {inbox}. Today is {today}. Search with a few words of the question, read "
    "the mail that was found, then call answer with the shortest answer and its sources. If no mail has the answer, "
    'call answer with "I don\'t know" and no sources.'
)
MAX_TURNS = 10
MAX_TOKENS = 256  # of an answer


async def answer_by_mail(
    request: dict[str, Any], model: Model, prompt: str = PROMPT, max_tokens: int = MAX_TOKENS
) -> str | None:
    """Work on one question; `mail` receives the answer. Returns the last message; None: out of turns or context."""
    import openai
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langgraph.errors import GraphRecursionError

    mail = request["mail"]

    @tool  # type: ignore[untyped-decorator]  # if LangChain is not installed
    async def search_emails(keywords: list[str]) -> str:
        """Find mails that have all of these words."""
        return str(mail.search_emails(keywords))

    @tool  # type: ignore[untyped-decorator]  # if LangChain is not installed
    async def read_email(message_id: str) -> str:
        """Read one mail."""
        return str(mail.read_email(message_id))

    @tool(return_direct=True)  # type: ignore[untyped-decorator]
    async def answer(answer: str, sources: list[str]) -> str:
        """Give the answer and the ids of the mails that it is from."""
        return str(mail.answer(answer, sources))

    agent = create_agent(
        model.langchain(max_tokens=max_tokens),
        [search_emails, read_email, answer],
        middleware=_middleware(mail),
        system_prompt=prompt.format(inbox=request["inbox"], today=request["today"]),
    )
    asked = {"messages": [{"role": "user", "content": request["question"]}]}
    try:
        state = await agent.ainvoke(asked, {"recursion_limit": 2 * MAX_TURNS + 1})
    except GraphRecursionError:
        return None
    except openai.BadRequestError as error:
        if not mail.calls or not is_context_full(error):
            raise
        return None
    return str(state["messages"][-1].content)


def _middleware(mail: Any) -> list[Any]:
    from langchain.agents.middleware import wrap_model_call, wrap_tool_call

    @wrap_model_call  # type: ignore[untyped-decorator]  # if LangChain is not installed
    async def replace_surrogates(request: Any, handler: Any) -> Any:
        """Arguments in JSON may have half of a surrogate pair, which the next request, in UTF-8, cannot repeat."""
        response = await handler(request)
        for call in (call for message in response.result for call in message.tool_calls):
            call["args"] = json.loads(json.dumps(call["args"], ensure_ascii=False).encode("utf-8", "replace"))
        return response

    @wrap_tool_call  # type: ignore[untyped-decorator]  # if LangChain is not installed
    async def record_unknown(request: Any, handler: Any) -> Any:
        if request.tool is None:
            mail.unknown_tool(request.tool_call["name"])
        return await handler(request)

    return [replace_surrogates, record_unknown]
