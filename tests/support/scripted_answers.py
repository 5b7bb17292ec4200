"""Answers of a scripted engine that depend only on its script."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from tests.support.script import Script


def break_off(request: web.Request) -> web.Response:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def bad_request(message: str) -> web.Response:
    """vLLM's answer to an invalid body."""
    error = {"message": message, "type": "Bad Request", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The `usage` of a chat, as in vLLM."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def write_events(request: web.Request, events: list[dict[str, Any]]) -> web.StreamResponse:
    """Write a whole stream at once."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def completion_choice(script: Script, body: dict[str, Any]) -> dict[str, Any]:
    """An echo precedes the text, except if token ids are requested; logprobs always contain it."""
    echo = body.get("echo") in (True, "true", "yes")
    logprobs = [None, *script.logprobs[: len(script.prompt_ids) - 1]] if echo else []
    choice = {
        "index": 0,
        "text": body["prompt"] + "answer" if echo and not body.get("return_token_ids") else "answer",
        "logprobs": {"token_logprobs": logprobs + script.logprobs} if body.get("logprobs") is not None else None,
        "prompt_logprobs": logprobs if echo and body.get("logprobs") is not None else None,
        "finish_reason": "stop",
    }
    if body.get("return_token_ids"):
        choice |= {"token_ids": script.reply_ids, "prompt_token_ids": script.prompt_ids}
    return choice


def token_events(
    script: Script, sampled: list[tuple[int, float]], body: dict[str, Any], head: dict[str, Any]
) -> list[dict[str, Any]]:
    """One event for each token. A held-back token has one only if its logprob or id is requested."""
    events, text = [], ""
    for position, (token, logprob) in enumerate(sampled):
        text += f"t{token}{script.padding}"
        held = position < script.held_back
        if held and not body.get("logprobs") and not body.get("return_token_ids"):
            continue
        choice: dict[str, Any] = {"index": 0, "delta": {} if held else {"content": text}, "logprobs": None}
        text = text if held else ""
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": f"t{token}", "logprob": logprob}]}
        choice["finish_reason"] = script.finish_reason if position == len(script.reply_ids) - 1 else None
        if body.get("return_token_ids"):
            choice["token_ids"] = [token]
        events.append({**head, "choices": [choice]})
    if script.fails_after_tokens is not None:
        events[script.fails_after_tokens :] = [{"error": {"message": "engine core died"}}]
    return events
