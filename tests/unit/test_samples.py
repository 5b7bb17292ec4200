"""Replies that somebody wrote, as tokens by the model's own chat template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.render import end_tokens, render
from services.samples import SampleReader
from tests.support.servers import make_config

THOUGHT = "<think>\n\n</think>\n\n"


class Engine:
    """Writes conversations by one template, a token for each character."""

    def __init__(self, template: Any) -> None:
        self._template = template

    async def tokenize(self, messages: list[Any], tools: Any, *, ends_with_reply: bool) -> list[int]:
        text = "".join(self._template(message) for message in messages)
        return [ord(character) for character in text + ("" if ends_with_reply else "<A>")]

    async def score(self, sequences: list[list[int]], model: str | None) -> list[list[float]]:
        return [[-1.0] * (len(token_ids) - 1) for token_ids in sequences]


def plain(message: Any) -> str:
    return f"<{'A' if message['role'] == 'assistant' else 'U'}>{message['content']}|\n"


def with_empty_thought(message: Any) -> str:
    thought = THOUGHT if message["role"] == "assistant" else ""
    return plain(message).replace(">", f">{thought}", 1)


def with_white_space(message: Any) -> str:
    return plain(message).replace("|", " |")


def rendered(template: Any, reply: str, ends: str = "") -> tuple[str, str]:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]
    tokens = asyncio.run(render(Engine(template), messages, None, frozenset(map(ord, ends))))  # type: ignore[arg-type]
    return "".join(map(chr, tokens.prompt_ids)), "".join(map(chr, tokens.reply_ids))


@pytest.mark.parametrize("reply", ["hello", "", "|", "two\n\n", "\n"])
def test_a_reply_ends_with_the_one_token_that_ends_it(reply):
    assert rendered(plain, reply) == ("<U>hi|\n<A>", f"{reply}|")


@pytest.mark.parametrize("reply", ["hello", "", "two\n\n", "\n"])
def test_what_the_template_writes_before_a_reply_is_the_models_own_and_cuts_nothing_off(reply):
    assert rendered(with_empty_thought, reply) == ("<U>hi|\n<A>", f"{THOUGHT}{reply}|")


def test_white_space_before_the_token_that_ends_a_reply_is_the_models_own():
    assert rendered(with_white_space, "hello", ends="|?") == ("<U>hi |\n<A>", "hello |")
    assert rendered(with_white_space, "hello", ends="?") == ("<U>hi |\n<A>", "hello ")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 106]}, "config.json": {"eos_token_id": 1}}, {1, 106}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 2}}, {2}),
        ({"generation_config.json": [], "config.json": {}}, set()),
        ({}, set()),
    ],
)
def test_the_tokens_that_end_a_reply_are_those_of_the_model_s_folder(files, ends, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path / "none", tmp_path) == ends


class Holder(Engine):
    """An engine that holds some versions, and notes which model is asked for logprobs."""

    def __init__(self, label: str | None, models: dict[str, str]) -> None:
        super().__init__(plain)
        self.label, self.models, self.asked = label, models, list[str | None]()

    async def list_models(self) -> dict[str, str]:
        return self.models

    async def read_label(self, *, may_load: bool) -> str | None:
        assert may_load
        return self.label

    async def score(self, sequences: list[list[int]], model: str | None) -> list[list[float]]:
        self.asked.append(model)
        return await super().score(sequences, model)


ADAPTERS = {"agent": "/v0", "agent@1+aaaaaaaa": "/v1", "agent@3+bbbbbbbb": "/v3", "agent@9+cccccccc": "/rejected"}


@pytest.mark.parametrize(
    ("kind", "label", "models", "asked", "version"),
    [
        ("lora", None, ADAPTERS, "agent@3+bbbbbbbb", 3),
        ("lora", None, {"agent": "/v0"}, None, 0),
        ("full", "3:0123456789abcdef", {}, None, 3),
        ("full", "loading:4", {}, None, 5),
        ("full", "default", {}, None, 5),
        ("full", None, {}, None, 5),
    ],
)
def test_a_rendered_row_names_the_version_whose_logprobs_it_has(
    kind, label, models, asked, version, monkeypatch, tmp_path
):
    engine = Holder(label, models)
    monkeypatch.setattr("services.samples.EngineAdmin", lambda *_: engine)
    config = make_config(tmp_path, ["http://127.0.0.1:1"], model={"kind": kind})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (row,) = asyncio.run(SampleReader(config, range(6)).read([{"messages": messages, "version": 2}]))
    assert (engine.asked, row.sample.version) == ([asked], version)
    assert row.sample.version_end != version, "it did not sample the reply"


def test_an_import_makes_no_token_of_the_engines(monkeypatch, tmp_path):
    monkeypatch.setattr("services.samples.EngineAdmin", lambda *_: Holder("3:0123456789abcdef", {}))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    config = make_config(tmp_path / "root", ["http://127.0.0.1:1"])
    assert len(asyncio.run(SampleReader(config, [0]).read([{"messages": messages}]))) == 1
    assert not (tmp_path / "root").exists()


def test_a_rendered_row_ends_with_the_end_token_of_version_0_where_the_model_is_not_mounted(tmp_path):
    config = make_config(tmp_path, ["http://127.0.0.1:1"])
    (tmp_path / "versions/v000000").mkdir(parents=True)
    (tmp_path / "versions/v000000/generation_config.json").write_text('{"eos_token_id": 2}')
    assert SampleReader(config, [0])._ends == {2}
