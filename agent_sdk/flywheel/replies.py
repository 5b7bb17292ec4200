"""Parses chat completions as received: whole replies, and streams, which are joined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]


def read_reply(content: bytes) -> tuple[str | None, str | None, list[Message]]:
    """Return the id, the model, and each choice's assistant message. Raises ValueError for anything but a chat.

    >>> read_reply(b'{"id": "c1", "choices": [{"message": {"role": "assistant", "content": "hi"}}]}')
    ('c1', None, [{'role': 'assistant', 'content': 'hi'}])
    """
    if content.lstrip()[:1] == b"{":
        reply = json.loads(content)
        messages = [choice["message"] for choice in reply.get("choices") or []]
    else:
        reply, messages = _read_stream(content)
    if not messages:
        raise ValueError("the reply has no choice")
    return reply.get("id"), reply.get("model"), messages


def _read_stream(content: bytes) -> tuple[dict[str, Any], list[Message]]:
    head: dict[str, Any] = {}
    choices: dict[int, Message] = {}
    ended = False
    for line in content.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        head = head or event
        for choice in event.get("choices") or []:
            _add(choices.setdefault(choice.get("index", 0), {"role": "assistant"}), choice.get("delta") or {})
    if not ended:
        raise ValueError("the stream broke off")
    return head, [_finished(choices[index]) for index in sorted(choices)]


def _add(message: Message, delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", {})
        call = calls.setdefault(piece.get("index", 0), {"id": None, "type": "function", "function": {}})
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        for name in ("name", "arguments"):
            if function.get(name):
                call["function"][name] = call["function"].get(name, "") + function[name]


def _finished(message: Message) -> Message:
    if "tool_calls" in message:
        message["tool_calls"] = [message["tool_calls"][index] for index in sorted(message["tool_calls"])]
    message.setdefault("content", None if "tool_calls" in message else "")
    return message


def thoughts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the reasoning in the assistant's messages, numbered by step.

    >>> thoughts_of([{"role": "assistant", "reasoning_content": "a tool is needed"}])
    [{'step': 1, 'content': 'a tool is needed'}]
    """
    said = [message for message in messages if message.get("role") == "assistant"]
    found = [
        (step, message.get("reasoning_content") or message.get("reasoning")) for step, message in enumerate(said, 1)
    ]
    return [{"step": step, "content": text} for step, text in found if text]


def tool_calls_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the tool calls of a conversation with their results; None if a result is unknown.

    >>> call = {"id": "c", "function": {"name": "search", "arguments": '{"q": "a"}'}}
    >>> result = {"role": "tool", "tool_call_id": "c", "content": "b"}
    >>> tool_calls_of([{"role": "assistant", "tool_calls": [call]}, result])
    [{'tool': 'search', 'args': {'q': 'a'}, 'result': 'b'}]
    """
    every = list(messages)
    results = {
        message.get("tool_call_id"): message.get("content") for message in every if message.get("role") == "tool"
    }
    found = []
    for message in every:
        for call in message.get("tool_calls") or []:
            function, result = call.get("function") or {}, results.get(call.get("id"))
            found.append({"tool": function.get("name"), "args": _object(function.get("arguments")), "result": result})
    return found


def _object(arguments: object) -> object:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
