"""Replies that somebody wrote, as tokens by the model's own chat template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.samples import _end_tokens, _render

THOUGHT = "<think>\n\n</think>\n\n"


class Engine:
    """Writes conversations by one template, a token for each character."""

    def __init__(self, template: Any) -> None:
        self._template = template

    async def tokenize(self, messages: list[Any], tools: Any, *, ends_with_reply: bool) -> list[int]:
        text = "".join(self._template(message) for message in messages)
        return [ord(character) for character in text + ("" if ends_with_reply else "<A>")]

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
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
    tokens = asyncio.run(_render(Engine(template), messages, None, frozenset(map(ord, ends))))  # type: ignore[arg-type]
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
    assert _end_tokens(tmp_path) == ends
