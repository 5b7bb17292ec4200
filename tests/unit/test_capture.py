"""A stream's events, put together."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from explorer_service.api.auth import Caller
from explorer_service.chat.capture import capture_events, capture_reply
from explorer_service.chat.request import CHAT, COMPLETION, Surface, parse_chat
from explorer_service.engines.dispatch import EngineReply
from explorer_service.errors import InvalidReply
from explorer_service.traffic.router import Router
from shared.config import Config, ModelConfig
from shared.experience import Sample, Sampling

ENGINE = SimpleNamespace(name="e", sampling_defaults=Sampling())
SLOT: Any = SimpleNamespace(engine=ENGINE, version=1, first_version=1, last_version=2)
CONFIG = Config(model=ModelConfig(path="m"))


def joined(*events: bytes) -> list[Sample]:
    chat = parse_chat(CHAT, b"{}", {}, Caller(), Router("agent", engines=1), CONFIG, {}, 0.0)
    return capture_events(list(events), replace(chat, msg_id="m"), SLOT)


def event(index: int, delta: dict[str, Any], *ids: int, **more: Any) -> bytes:
    logprobs = {"content": [{"token": "t", "logprob": -number / 10} for number in ids]} if ids else None
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "token_ids": list(ids) or None, **more}
    return b"data: " + json.dumps({"id": "m", "choices": [choice]}).encode() + b"\n\n"


def test_texts_tools_and_tokens_of_several_choices_are_joined_in_their_order():
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    one, two = joined(
        b'data: {"choices":[],"prompt_token_ids":[5,6]}\n\n',
        event(0, {"role": "assistant", "content": ""}),
        event(1, {"role": "assistant", "content": ""}),
        event(0, {"content": "a"}, 1),
        event(1, {"content": "z"}, 9),
        event(0, {"content": "b"}, 2),
        event(0, {"content": "c", "tool_calls": [call]}, 3),
        b": a comment\n\n",
        event(0, {"content": "d"}, 4),
        event(0, {"tool_calls": [more]}, finish_reason="tool_calls"),
        b'data: {"choices":[],"usage":{"total_tokens":9}}\n\n',
    )
    assert [one.choice, two.choice] == [0, 1]
    assert one.tokens.prompt_ids.tolist() == two.tokens.prompt_ids.tolist() == [5, 6]
    assert one.tokens.reply_ids.tolist() == [1, 2, 3, 4]
    assert one.tokens.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert (one.finish_reason, two.finish_reason) == ("tool_calls", None)
    function = {"name": "look", "arguments": '{"a":1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert json.loads(one.reply or b"") == {"role": "assistant", "content": "abcd", "tool_calls": calls}
    assert json.loads(two.reply or b"") == {"role": "assistant", "content": "z"}


def test_a_part_that_says_nothing_adds_nothing():
    silent = b'data: {"id":"m","choices":[{"index":0,"delta":null,"finish_reason":"stop"}]}\n\n'
    (one,) = joined(event(0, {"role": "assistant", "tool_calls": []}, 1), event(0, {}, 2), silent)
    assert json.loads(one.reply or b"") == {"role": "assistant", "tool_calls": []}
    assert (one.tokens.reply_ids.tolist(), one.finish_reason) == ([1, 2], "stop")


def test_a_plain_completions_parts_are_its_text():
    parts = [
        b'data: {"id":"m","choices":[{"index":0,"text":"%s","token_ids":[1]}]}\n\n' % text for text in (b"a", b"", b"b")
    ]
    (one,) = joined(*parts)
    assert json.loads(one.reply or b"") == {"content": "ab"}


def test_an_error_in_a_stream_is_no_sample():
    assert joined(b'data: {"error":{"message":"engine core died"}}\n\n') == []


def test_what_a_stream_said_before_an_error_is_no_sample():
    """vLLM's API process outlives its engine core: it reports the error in an event, and [DONE] after it."""
    said = [event(0, {"content": "half"}, 1), event(1, {"content": "whole"}, 2, finish_reason="stop")]
    assert len(joined(*said, b'data: {"error":null,"choices":[]}\n\n')) == 2
    assert joined(*said, b'data: {"error":{"message":"engine core died"}}\n\n') == []


def test_a_finish_reason_longer_than_its_column_is_shortened():
    (sample,) = joined(event(0, {"content": "a"}, 1, finish_reason="r" * 41))
    assert sample.finish_reason == "r" * 40


@pytest.mark.parametrize(
    "text",
    [
        b"{not json",
        b'{"id":"m","choices":[{"delta":{}}]}',
        b'{"id":"m","choices":[{"index":0,"token_ids":"x"}]}',
        b'{"id":"m","choices":[{"index":2147483648,"delta":{}}]}',
        b'{"id":"m","choices":[{"index":-1,"delta":{}}]}',
        b'{"id":"m","choices":[{"index":0,"delta":{"content":"\xff"}}]}',
        b'{"id":"m","choices":[{"index":0,"delta":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}",
    ],
    ids=lambda text: repr(text[:60]),
)
def test_what_is_no_completion_is_the_engines_fault(text):
    with pytest.raises(InvalidReply, match="engine e streamed what is no chat completion"):
        joined(b"data: " + text + b"\n\n")


@pytest.mark.parametrize(
    ("surface", "says"),
    [(CHAT, b'"message":{"content":"\xff"}'), (COMPLETION, b'"text":"\xff"')],
    ids=["chat", "plain"],
)
def test_a_whole_reply_whose_text_is_no_utf8_is_the_engines_fault(surface: Surface, says: bytes):
    chat = replace(parse_chat(surface, b"{}", {}, Caller(), Router("agent", engines=1), CONFIG, {}, 0.0), msg_id="m")
    content = b'{"id":"m","choices":[{"index":0,"token_ids":[1],%b}],"prompt_token_ids":[1]}' % says
    with pytest.raises(InvalidReply, match="engine e gave a reply that is no chat completion"):
        capture_reply(chat, EngineReply(SLOT, 200, "application/json", content, 0.0))


def test_a_reply_that_is_not_recorded_may_have_logprobs_of_any_form():
    chat = parse_chat(CHAT, b'{"store":false}', {}, Caller(), Router("agent", engines=1), CONFIG, {}, 0.0)
    content = b'{"id":"m","choices":[{"index":0,"message":{},"logprobs":["inf"],"finish_reason":"stop"}]}'
    assert capture_reply(replace(chat, msg_id="m"), EngineReply(SLOT, 200, "application/json", content, 0.0)) == []


@pytest.mark.parametrize(
    "calls", [[{"index": 10**9}], [{"index": -1}], [{"index": "x"}], [{"index": None}], ["x"], "x", 7, {"index": 0}]
)
def test_tool_calls_that_are_none_are_the_engines_fault(calls):
    with pytest.raises(InvalidReply):
        joined(event(0, {"role": "assistant", "tool_calls": calls}, 1))


def test_a_field_that_changes_its_type_breaks_nothing():
    changing: list[Any] = ["text", {"a": 1}, "text", None, 3, {"b": 2}, [4]]
    (sample,) = joined(*(event(0, {"reasoning": value}, 1) for value in changing))
    assert json.loads(sample.reply or b"") == {"reasoning": [4]}
