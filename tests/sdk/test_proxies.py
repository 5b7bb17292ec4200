"""Models that are not of an explorer are reached over the proxy that the environment names."""

from __future__ import annotations

import json
from typing import Any

import flywheel
import openai
import pytest
from flywheel.connections import proxy_for

from tests.sdk.test_client import answering

REPLY = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "judge",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "over the proxy"}}],
}


@pytest.fixture
def asked(monkeypatch):
    """What the proxy is asked for."""
    seen: list[str] = []

    def answer(_number, request):
        seen.append(request.path)
        assert json.loads(request.body)["temperature"] == 0
        return 200, {"Content-Type": "application/json"}, json.dumps(REPLY).encode()

    for name in ("all_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with answering(answer) as url:
        monkeypatch.setenv("http_proxy", url)
        yield seen


CHAT = {"model": "judge", "messages": [{"role": "user", "content": "good?"}]}


async def test_a_model_with_parameters_is_reached_over_the_proxy(asked):
    model = flywheel.Model.of("http://judge.invalid/v1", "judge", key="k", temperature=0)
    with model.openai(max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content == "over the proxy"
    async with model.async_openai(max_retries=0) as client:
        reply = await client.chat.completions.create(**CHAT)
    assert reply.choices[0].message.content == "over the proxy"
    assert asked == ["http://judge.invalid/v1/chat/completions"] * 2


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://judge.invalid/v1", "http://proxy:3128"),
        ("https://judge.invalid/v1", None),
        ("http://judge.inside:8000/v1", None),
        ("http://127.0.0.1:8000/v1", None),
        ("http://[::1]:8000/v1", None),
    ],
)
def test_the_proxy_of_a_url(url, proxy, monkeypatch, asked):
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", ".inside")
    assert proxy_for(url) == proxy


async def test_a_collected_client_is_reached_over_the_proxy(asked, tmp_path):
    url, body = "http://judge.invalid/v1", {**CHAT, "temperature": 0}
    with flywheel.Collector(tmp_path / "chats.jsonl") as collector:
        given: dict[str, Any] = {"base_url": url, "api_key": "k", "max_retries": 0}
        with openai.OpenAI(http_client=collector.http_client(), **given) as client:
            client.chat.completions.create(**body)
        async with openai.AsyncOpenAI(http_client=collector.async_http_client(), **given) as client:
            await client.chat.completions.create(**body)
    assert asked == ["http://judge.invalid/v1/chat/completions"] * 2
    assert collector.stats.rows == 2
