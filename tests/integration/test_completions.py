"""Requests whose recording would change the answer, and replies under another id than the one asked for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from shared.experience import Tokens
from shared.ledger.tables import experiences, payloads
from tests.support.postgres import sqlite_alone
from tests.support.servers import RunningExplorer

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = ("/v1/chat/completions", {"messages": MESSAGES})
COMPLETION = ("/v1/completions", {"prompt": "hi"})
SURFACES = pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION], ids=["chat", "completion"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


database_url = sqlite_alone  # what is recorded depends on no database


def rows(explorer: RunningExplorer) -> list[dict[str, Any]]:
    with explorer.ledger.read() as connection:
        query = select(experiences, payloads).join(payloads, payloads.c.experience_id == experiences.c.id)
        return [dict(row._mapping) for row in connection.execute(query.order_by(experiences.c.id))]


def complete(explorer: RunningExplorer, **body: object) -> httpx.Response:
    return explorer.http.post("/v1/completions", json={"prompt": "hi", **body})


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream but `[DONE]`, or the one answer."""
    data = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(event) for event in data or [reply.text]]


@STREAMED
def test_a_completion_with_an_echo_is_the_engines_and_is_not_recorded(explorer, scripted_engine, stream):
    for more in ({}, {"echo": "yes"}, {"logprobs": 1}, {"return_token_ids": True}):
        asked = {"echo": True, "stream": stream, **more}
        reply = complete(explorer, **asked)
        assert reply.headers["X-Flywheel-Recorded"] == "false", more
        assert reply.headers["X-Flywheel-Version"] == "0", more
        expected = "answer" if "return_token_ids" in more else "hianswer"
        assert [event["choices"][0]["text"] for event in events_of(reply)] == [expected]
        assert rows(explorer) == [], more
        sent = {name: value for name, value in scripted_engine.script.bodies[-1].items() if name != "model"}
        assert sent == {"prompt": "hi", **asked}


@pytest.mark.parametrize("echo", [False, None, "no"])
def test_a_completion_without_an_echo_is_recorded(explorer, scripted_engine, echo):
    reply = complete(explorer, echo=echo)
    assert "X-Flywheel-Recorded" not in reply.headers
    (row,) = rows(explorer)
    tokens = Tokens.decode(row["tokens"])
    assert (row["msg_id"], row["state"]) == (reply.json()["id"], "RECORDED")
    assert tokens.reply_ids.tolist() == scripted_engine.script.reply_ids
    assert len(tokens.logprobs) == len(tokens.reply_ids)


@STREAMED
def test_what_token_ids_cannot_tell_of_is_served_and_not_recorded(explorer, scripted_engine, stream):
    """A beam is no sample of the policy, embeddings are no tokens, and hidden reasoning hides its tokens."""
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "use_beam_search": True}),
        ("/v1/completions", {"prompt": "hi", "prompt_embeds": "AAAA"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "use_beam_search": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "include_reasoning": False}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AA"}]}]},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "video_embeds", "video_embeds": "AA"}]}]},
        ),
    ):
        asked: dict[str, Any] = {**body, "stream": stream}
        reply = explorer.http.post(path, json=asked)
        assert (reply.status_code, reply.headers.get("X-Flywheel-Recorded")) == (200, "false"), asked
        assert rows(explorer) == [], asked
        sent = {name: value for name, value in scripted_engine.script.bodies[-1].items() if name != "model"}
        assert sent == asked


@STREAMED
@SURFACES
def test_a_reply_that_the_caller_does_not_want_stored_says_that_it_is_not_recorded(explorer, path, body, stream):
    reply = explorer.http.post(path, json={**body, "store": False, "stream": stream})
    assert reply.headers["X-Flywheel-Recorded"] == "false"


@STREAMED
@SURFACES
def test_a_reply_under_another_id_is_an_error_and_is_not_recorded(explorer, scripted_engine, path, body, stream):
    scripted_engine.script.reply_id = "chatcmpl-of-another-request"
    reply = explorer.http.post(path, json={**body, "stream": stream})
    error = events_of(reply)[-1]["error"]
    assert error["code"] == "engine_reply"
    assert "of-another-request" not in reply.text.replace(error["message"], "")
    assert "[DONE]" not in reply.text
    assert stream or reply.status_code == 503
    assert rows(explorer) == []


@STREAMED
@SURFACES
def test_an_id_that_the_caller_asks_for_does_not_become_the_replys(explorer, path, body, stream):
    asked = {**body, "request_id": "mine", "stream": stream}
    reply = explorer.http.post(path, json=asked, headers={"X-Request-Id": "mine"})
    assert reply.status_code == 200
    (msg_id,) = {event["id"] for event in events_of(reply)}
    assert not msg_id.endswith("-mine")
    assert [row["msg_id"] for row in rows(explorer)] == [msg_id]
    receipt = explorer.http.post("/feedback", json={"msg_ids": [msg_id], "reward": 1}).json()["receipts"][0]
    assert receipt["state"] == "applied"


def test_logprobs_of_a_completion_are_asked_for_whatever_a_chat_would_have_set(explorer, scripted_engine):
    """`top_logprobs` and a wrong `return_token_ids` are a chat's and the engine's business."""
    complete(explorer, top_logprobs=3)
    assert scripted_engine.script.bodies[-1]["logprobs"] == 0
    assert [row["state"] for row in rows(explorer)] == ["RECORDED"]


def test_a_part_of_a_message_whose_type_is_no_text_is_the_engine_s_business(explorer, scripted_engine):
    for kind in (["x"], {"a": 1}, 7, None):
        messages = [{"role": "user", "content": [{"type": kind, "text": "hi"}]}]
        assert explorer.http.post("/chat", json={"messages": messages}).status_code == 200
        assert scripted_engine.script.bodies[-1]["messages"] == messages


@SURFACES
def test_what_the_engine_would_refuse_reaches_it_unchanged(explorer, scripted_engine, path, body):
    explorer.http.post(path, json={**body, "return_token_ids": "perhaps"})
    assert scripted_engine.script.bodies[-1]["return_token_ids"] == "perhaps"
    explorer.http.post(path, json={**body, "logprob_token_ids": [5]})
    assert "logprobs" not in scripted_engine.script.bodies[-1]


def test_an_event_that_only_recording_asked_for_does_not_go_to_the_caller(explorer, scripted_engine):
    """While a tool parser holds text back, vLLM sends an event for each token only because token ids are asked for."""
    scripted_engine.script.held_back = 2
    reply = explorer.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    assert [event["choices"][0]["delta"].get("content") for event in events_of(reply)] == ["", "t11t12t13"]
    assert Tokens.decode(rows(explorer)[0]["tokens"]).reply_ids.tolist() == [11, 12, 13]
    asked = {"messages": MESSAGES, "stream": True, "return_token_ids": True}
    assert len(events_of(explorer.http.post("/v1/chat/completions", json=asked))) == 4


@pytest.mark.parametrize("model", ["nobody", 5])
def test_a_model_name_that_is_none_is_refused_by_the_engine(explorer, scripted_engine, model):
    """So that a body with two faults is refused for the same one."""
    reply = complete(explorer, model=model, prompt="")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "prompt: field required")
    assert complete(explorer, model=model).status_code in (400, 404)
    assert complete(explorer, model="").status_code == 200


@STREAMED
def test_an_adapter_that_the_engine_knows_by_name_is_not_reached_by_it(explorer, scripted_engine, stream):
    """The engine answers to its adapters' names; a row under one would carry no version."""
    scripted_engine.script.models.add("v000001")
    assert complete(explorer, model="v000001", stream=stream).status_code == 404
    assert rows(explorer) == []


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", {"messages": MESSAGES}), COMPLETION])
def test_a_field_of_the_other_surface_counts_for_nothing(explorer, path, body):
    """vLLM ignores it: it makes no choices, and links no completion to a chat."""
    said = explorer.chat(messages=MESSAGES).json()["choices"][0]["message"]
    others = {"prompt": ["x"] * 65} if "messages" in body else {"messages": [*MESSAGES, said, *MESSAGES]}
    reply = explorer.http.post(path, json={**body, **others})
    assert reply.status_code == 200, reply.text
    assert [row["parent_id"] for row in rows(explorer)] == [None, None]
