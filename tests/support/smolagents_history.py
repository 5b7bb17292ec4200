"""An agent's history in smolagents 1.26: tool calls are text, and their results are user messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


def tool_step(reply: Mapping[str, Any], results: Sequence[str]) -> list[Message]:
    """The messages of a ToolCallingAgent for a reply with tool calls. It sorts the calls by their ids."""
    calls = [
        _call(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in sorted(reply["tool_calls"], key=lambda call: call["id"])
    ]
    content = reply.get("content")
    return [_as_text(content, calls), text_message("user", "Observation:\n" + "\n".join(results))]


def code_step(content: str, number: int, result: str) -> list[Message]:
    """The messages of a CodeAgent for a text reply: it adds the closing tag, and a call with its own id."""
    closed = content if content.strip().endswith("</code>") else content + "</code>"
    code = closed.split("<code>")[1].split("</code>")[0].strip()
    call = _call(f"call_{number}", "python_interpreter", code)
    return [_as_text(closed, [call]), text_message("user", f"Observation:\nExecution logs:\n{result}")]


def text_message(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _call(name_of_call: str, function: str, arguments: Any) -> dict[str, Any]:
    return {"id": name_of_call, "type": "function", "function": {"name": function, "arguments": arguments}}


def _as_text(content: str | None, calls: Sequence[Mapping[str, Any]]) -> Message:
    parts = [] if content is None else [content.strip()]
    return text_message("assistant", "\n".join([*parts, f"Calling tools:\n{calls}"]))
