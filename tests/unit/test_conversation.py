"""Linking turns: what counts as the same exchange, and what does not."""

from __future__ import annotations

import pytest

from explorer_service.conversation import read_prompt

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}


def exchange(messages, reply, *scope):
    digest, _ = read_prompt(messages, *scope)
    return digest.copy().add_reply({"role": "assistant", **reply})


def test_a_request_that_continues_an_exchange_names_its_digest():
    _, extends = read_prompt([USER, REPLY, {"role": "user", "content": "and now?"}])
    assert extends == (exchange([USER], REPLY),)


def test_the_longest_exchange_comes_first():
    messages = [USER, REPLY, {"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}, USER]
    _, extends = read_prompt(messages)
    assert extends == (exchange(messages[:3], messages[3]), exchange([USER], REPLY))


def call(arguments, **more):
    function = {"name": "search", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function, **more}]}


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        (REPLY, {**REPLY, "refusal": None, "tool_calls": [], "reasoning_content": "hm"}),
        ({"role": "assistant", "content": " hello\n"}, REPLY),
        (REPLY, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}),
        ({**call('{"q": "x", "n": 1}'), "content": None}, call('{"n":1,"q":"x"}', index=0)),
        (call("no json"), {**call("no json"), "content": ""}),
    ],
)
def test_a_reply_is_known_again_however_the_client_writes_it(sent, returned):
    _, extends = read_prompt([USER, returned, USER])
    assert extends == (exchange([USER], sent),)


def with_id(name):
    message = call("{}")
    message["tool_calls"][0]["id"] = name
    return message


@pytest.mark.parametrize("name", ["chatcmpl-tool-9f86d081884c7d659a2feaa0c55ad015", "bbc5b7ede", "call_" + "0a" * 12])
def test_an_exchange_that_ends_with_a_tool_call_is_known_by_its_random_id_in_a_rewritten_history(name):
    _, extends = read_prompt([{"role": "user", "content": "(summary of what was)"}, with_id(name), USER])
    assert extends == (exchange([USER], with_id(name)),)
    assert extends != (exchange([USER], with_id(name), "another key"),)


@pytest.mark.parametrize("name", ["functions.search:0", "call_1", None, 7])
def test_ids_that_come_again_in_every_conversation_do_not_identify_one(name):
    assert read_prompt([{"role": "user", "content": "another"}, with_id(name), USER])[1] != (
        exchange([USER], with_id(name)),
    )


def test_a_reminder_that_moves_along_does_not_break_the_conversation():
    reminder = {"role": "user", "content": [{"type": "text", "text": "<system-reminder>It is noon</system-reminder>"}]}
    _, extends = read_prompt([USER, REPLY, {"role": "user", "content": "two"}, reminder])
    assert extends == (exchange([USER, reminder], REPLY),)
    assert extends != read_prompt([USER, {"role": "user", "content": "<system-reminder>?"}, REPLY])[1]


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "hello!"},
        {"role": "user", "content": "hello"},
        call('{"q": "x"}'),
    ],
)
def test_another_reply_is_another_exchange(other):
    assert exchange([USER], REPLY) != read_prompt([USER, other, USER])[1]


def test_keys_and_runs_do_not_mix():
    digests = {exchange([USER], REPLY, *scope) for scope in [("a", None), ("b", None), (None, "a"), (None, None)]}
    assert len(digests) == 4


@pytest.mark.parametrize("messages", [None, 3, "text", [None, 1, {"role": 2, "content": {"x": float("1e300")}}], []])
def test_messages_that_make_no_sense_do_no_harm(messages):
    assert read_prompt(messages)[1] == ()
