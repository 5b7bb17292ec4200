"""A caller gets the engine's own JSON, without what only recording asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from explorer_service.chat.redact import redact

SAID = 'she said "logprobs":{"x"},"finish_reason": and token_ids":[1] \\'


def as_engines_write(name: str) -> list[list[dict[str, Any]]]:
    """Choices of a reply: fields in vLLM's order and in others; alone and together. name: the field of what is said."""
    logprobs = {"content": [{"token": '},"finish_reason":', "logprob": -1.0, "bytes": [125], "top_logprobs": []}]}
    fields = {"index": 0, name: {"content": SAID}, "logprobs": logprobs, "finish_reason": "logprobs", "token_ids": [7]}
    swapped = {field: fields[field] for field in reversed(fields)}
    between = {field: fields[field] for field in ("logprobs", name, "finish_reason", "index", "token_ids")}
    without = {**fields, "logprobs": None, "token_ids": None}
    last = {"index": 0, name: fields[name], "finish_reason": "stop", "token_ids": [7], "logprobs": logprobs}
    stopped = {**fields, "finish_reason": "stop"}
    several = [[fields, swapped], [between, fields], [without, fields], [last, stopped], [last, last]]
    return [[fields], [swapped], [between], [without], [last], *several, []]


def asked_for(choices: list[dict[str, Any]]) -> Iterator[tuple[bytes, SimpleNamespace, dict[str, Any]]]:
    """The reply, whatever its spacing; what is asked for; and the reply that this leaves."""
    reply = {"id": "x", "choices": choices, "prompt_token_ids": [1, 2]}
    for keep_logprobs, keep_ids in itertools.product((True, False), repeat=2):
        gone = {} if keep_logprobs else {"logprobs": None}
        if not keep_ids:
            gone["token_ids"] = None
        left = {**reply, "choices": [{**choice, **gone} for choice in choices]}
        left["prompt_token_ids"] = [1, 2] if keep_ids else None
        for separators in ((",", ":"), (", ", ": "), (" ,", " :\n")):
            text = json.dumps(reply, separators=separators).encode()
            yield text, SimpleNamespace(recorded=True, wants_logprobs=keep_logprobs, wants_token_ids=keep_ids), left


@pytest.mark.parametrize("choices", as_engines_write("delta"))
def test_an_event_loses_only_what_was_not_asked_for_however_the_engine_writes_it(choices):
    for text, asked, left in asked_for(choices):
        assert json.loads(redact(b"data: " + text + b"\n\n", asked)[6:]) == left


@pytest.mark.parametrize("choices", as_engines_write("message"))
def test_a_whole_reply_loses_only_what_was_not_asked_for_however_the_engine_writes_it(choices):
    for text, asked, left in asked_for(choices):
        assert json.loads(redact(text, asked)) == left


def test_what_is_no_completion_goes_on_as_it_is():
    asked = SimpleNamespace(recorded=True, wants_logprobs=False, wants_token_ids=False)
    broken_off = b'data: {"choices":[{"token_ids":[1,\n\n'
    for event in (
        b": ping\n\n",
        b'data: {"error":{"message":"\\"logprobs\\":"}}\n\n',
        b'data: "logprobs" :{\n\n',
        broken_off,
    ):
        assert redact(event, asked) == event


def test_every_choice_of_a_reply_is_cut():
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    choice = {"index": 0, "message": {}, "logprobs": {"content": [entry] * 3}, "finish_reason": "stop"}
    asked = SimpleNamespace(recorded=True, wants_logprobs=False, wants_token_ids=False)
    text = json.dumps({"choices": [choice | {"token_ids": [7] * 3}] * 64}, separators=(",", ":")).encode()
    cut = choice | {"logprobs": None, "token_ids": None}
    assert json.loads(redact(text, asked)) == {"choices": [cut] * 64}
