"""Through the explorer or straight to the engine: the same request gets the same JSON, but for ids and times."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Live

pytestmark = pytest.mark.engine

USER = {"role": "user", "content": "hello w1 w2"}
ROUND = [USER, {"role": "assistant", "content": "w3 w4"}, {"role": "user", "content": "w5"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

CONVERSATIONS: list[Any] = [
    [USER],
    [{"role": "system", "content": "w9"}, USER],
    ROUND,
    [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "w7"}]}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "grüße 你好 😀"}],
    [{"role": "user", "content": "hello", "name": "anna"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function",
      "function": {"name": "look", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "w8"}],
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_completion_tokens": 5},
    {"top_p": 0.5, "temperature": 1.0, "seed": 7},
    {"top_k": 5, "temperature": 0.7, "seed": 7},
    {"min_p": 0.1, "temperature": 1.3, "seed": 7},
    {"temperature": "0.5", "seed": 3},
    {"n": 3, "temperature": 1.0, "seed": 11},
    {"stop": "w1"},
    {"stop": ["w1", "w2"], "include_stop_str_in_output": True},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"20": 5.0}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": False},
    {"return_token_ids": True},
    {"return_token_ids": True, "logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 5},
    {"min_tokens": 6, "ignore_eos": True},
    {"skip_special_tokens": False},
    {"add_generation_prompt": False},
    {"user": "anna", "metadata": {"task_id": "t"}},
    {"store": False},
    {"store": True},
    {"prompt_logprobs": 1},
    {"tool_choice": "none", "tools": [TOOL]},
    {"model": None},
    {"unknown_field": {"a": [1]}},
    {"response_format": {"type": "text"}},
]
REFUSED: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"top_k": -5},
    {"min_p": 3},
    {"n": 0},
    {"n": "x"},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 100_000},
    {"messages": None},
    {"messages": "hello"},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [3]},
    {"logprobs": "perhaps"},
    {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": True, "top_logprobs": 10_000},
    {"stop": 5},
    {"seed": "x"},
    {"stream": "perhaps"},
    {"stream_options": {"include_usage": True}},
    {"response_format": {"type": "nonsense"}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999999": 1}},
    {"tools": "x"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"presence_penalty": 9},
    {"repetition_penalty": -1},
    {"model": "nobody"},
]


def requests() -> list[dict[str, Any]]:
    base = {"model": "agent", "max_tokens": 10, "temperature": 0}
    plain = [{**base, "messages": messages} for messages in CONVERSATIONS]
    plain += [{**base, "messages": [USER], **settings} for settings in SETTINGS]
    streams = [{**body, "stream": True} for body in plain]
    streams += [{**body, "stream_options": {"include_usage": True}} for body in streams[:3]]
    streams.append({**base, "messages": [USER], "stream": "true"})
    return plain + streams + [{**base, "messages": [USER], **refused} for refused in REFUSED]


def ask(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status, and the JSON or the stream's events, without ids and times."""
    reply = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    if "text/event-stream" in reply.headers["content-type"]:
        events = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: ")]
        answers = [event if event == "[DONE]" else clean(json.loads(event)) for event in events]
        return reply.status_code, sorted(answers, key=_choice_index)  # choices overtake each other
    return reply.status_code, clean(reply.json())


def _choice_index(event: Any) -> int:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0]["index"] if choices else 99


def said(events: list[Any]) -> dict[tuple[int, str], str]:
    """All that a stream says of each choice, however its tokens are grouped into events."""
    whole: dict[tuple[int, str], str] = {}
    for choice in (choice for event in events if isinstance(event, dict) for choice in event.get("choices", ())):
        logprobs = choice.get("logprobs") or {}
        parts = {
            "text": choice["delta"].get("content") or "",
            "ids": "".join(f"{token} " for token in choice.get("token_ids") or ()),
            "tokens": "".join(f"{entry['token']} " for entry in logprobs.get("content") or ()),
            "finish": choice.get("finish_reason") or "",
        }
        for name, part in parts.items():
            whole[choice["index"], name] = whole.get((choice["index"], name), "") + part
    return whole


def clean(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def differences(straight: Any, through: Any, where: str = "") -> list[str]:
    """Where the two differ; floats may differ in their last bits, as batches do."""
    if isinstance(straight, dict) and isinstance(through, dict):
        missing = [f"{where}.{name}: only one has it" for name in straight.keys() ^ through.keys()]
        both = straight.keys() & through.keys()
        return missing + [d for name in both for d in differences(straight[name], through[name], f"{where}.{name}")]
    if isinstance(straight, list) and isinstance(through, list) and len(straight) == len(through):
        pairs = enumerate(zip(straight, through, strict=True))
        return [d for index, (a, b) in pairs for d in differences(a, b, f"{where}[{index}]")]
    if isinstance(straight, float) and isinstance(through, float):
        return [] if abs(straight - through) < 1e-4 else [f"{where}: {straight} and {through}"]
    return [] if straight == through else [f"{where}: {straight!r} and {through!r}"]


@pytest.fixture(scope="module")
def explorer_url(live: Live) -> str:
    return str(live.http.base_url).rstrip("/")


@pytest.mark.parametrize("body", requests(), ids=lambda body: json.dumps(body)[:100])
def test_the_same_json_comes_back(live, explorer_url, body):
    for _ in range(5):
        straight_status, straight = ask(live.engine_url, body)
        status, through = ask(explorer_url, body)
        assert status == straight_status, through
        if isinstance(straight, dict) or said(straight) != said(through) or not differences(straight, through):
            break  # else a busy engine has put two of the same tokens into one event, as it comes
    assert differences(straight, through) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": ["hello w1", "w2"]},
        {"prompt": [5, 6, 7]},
        {"return_token_ids": True},
        {"max_tokens": 0},
        {"prompt": None},
        {"stream": True, "prompt": [5, 6, 7]},
        {"stream": True, "logprobs": 1, "prompt": [5, 6, 7]},
    ],
)
def test_plain_completions_are_the_same_too_and_are_recorded(live, explorer_url, settings):
    body = {"model": "agent", "prompt": "hello w1 w2", "max_tokens": 6, "temperature": 0, **settings}

    def post(url: str) -> tuple[int, Any, str]:
        reply = httpx.post(url + "/v1/completions", json=body, timeout=60)
        if "text/event-stream" in reply.headers["content-type"]:
            lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
            return reply.status_code, [clean(json.loads(line)) for line in lines], json.loads(lines[0]).get("id", lines)
        return reply.status_code, clean(reply.json()), reply.json().get("id", "")

    straight_status, straight, _ = post(live.engine_url)
    status, through, msg_id = post(explorer_url)
    assert status == straight_status, through
    assert differences(straight, through) == []
    if status == 200:
        receipt = live.http.post("/feedback", json={"msg_ids": [msg_id], "comment": "seen"}).json()["receipts"][0]
        assert receipt["state"] == "applied"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "agent", "input": "hello w1", "max_output_tokens": 6, "temperature": 0}),
        ("/v1/messages", {"model": "agent", "messages": [USER], "max_tokens": 6, "temperature": 0}),
        ("/tokenize", {"model": "agent", "prompt": "hello w1"}),
        ("/detokenize", {"model": "agent", "tokens": [7, 8]}),
    ],
)
def test_other_surfaces_are_served_and_say_that_they_are_not_recorded(live, path, body):
    rows = sum(live.status()["rows"].values())
    reply = live.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["X-Flywheel-Recorded"] == "false"
    assert sum(live.status()["rows"].values()) == rows
