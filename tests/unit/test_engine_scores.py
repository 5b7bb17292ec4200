"""Logprobs of given tokens: of several sequences at once, each its own, or an error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from explorer_service.engines.admin import EngineAdmin
from shared.errors import EngineError

SEQUENCES = [[5, 6, 7], [8, 9]]
CHOICES = [
    {"index": 0, "prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}}]},
    {"index": 1, "prompt_logprobs": [None, {"9": {"logprob": -3.0}}]},
]


async def score(choices: Any, asked: list[dict[str, Any]] | None = None) -> list[list[float]]:
    """The scores of SEQUENCES at an engine that answers with these choices. asked: gets the bodies of its requests."""

    def answer(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": choices})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await EngineAdmin(client, "http://engine", "agent", 60.0).score(SEQUENCES)


async def test_several_sequences_are_one_request_and_each_has_its_own_logprobs():
    asked: list[dict[str, Any]] = []
    assert await score(CHOICES, asked) == [[-1.0, -2.0], [-3.0]]
    assert [body["prompt"] for body in asked] == [SEQUENCES]


@pytest.mark.parametrize(
    "choices",
    [
        CHOICES[:1],
        CHOICES[::-1],
        [*CHOICES, CHOICES[0]],
        [CHOICES[0], {"index": 1, "prompt_logprobs": None}],
        [CHOICES[0], {"index": 1}],
        None,
    ],
    ids=["too few", "in another order", "too many", "null", "missing", "no choices"],
)
async def test_logprobs_that_are_not_one_for_each_token_of_each_sequence_are_an_error(choices):
    with pytest.raises(EngineError, match="returned no prompt_logprobs"):
        await score(choices)
