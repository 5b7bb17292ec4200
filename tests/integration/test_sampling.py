"""How a row was sampled is recorded as the engine did it: penalties, defaults of the model, and masks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sqlalchemy import select

from explorer_service.reload.probe import read_sampling_defaults
from shared.experience import Sampling
from shared.ledger import queries, transitions
from shared.ledger.tables import experiences
from tests.integration.test_update import train
from tests.support.experiences import make_experiences
from tests.support.forms import one_database

pytestmark = one_database
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def recorded(explorer, **body: object):
    name = explorer.chat(**body).raise_for_status().json()["id"]
    with explorer.ledger.read() as connection:
        return connection.execute(select(experiences).where(experiences.c.msg_id == name)).one()


def test_the_penalties_of_a_request_are_recorded(explorer):
    row = recorded(explorer, repetition_penalty=1.2, presence_penalty="0.5", frequency_penalty=-1)
    assert [row._mapping[name] for name in PENALTIES] == [1.2, 0.5, -1.0]
    assert [recorded(explorer)._mapping[name] for name in (*PENALTIES, "masked")] == [1.0, 0.0, 0.0, False]


def test_the_penalties_that_a_model_brings_are_vllms_defaults_and_ours(tmp_path):
    """Qwen2.5-Instruct has such a file."""
    written = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert read_sampling_defaults(tmp_path) == Sampling(0.7, 0.8, 20, repetition_penalty=1.1)


def test_a_reply_whose_tokens_were_forced_or_forbidden_is_marked(explorer):
    for body in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"logit_bias": {"5": 10}},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 2},
        {"thinking_token_budget": 64},
        {"thinking_token_budget": 0},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    ):
        assert recorded(explorer, **body).masked, body


def test_a_reply_to_tools_is_marked_if_the_tool_parser_constrains_every_call(scripted_engine, start_explorer):
    explorer = start_explorer([scripted_engine.url], engine={"tool_parser": "glm47"}).wait_ready()
    assert recorded(explorer, tools=[TOOL]).masked
    assert not recorded(explorer, tools=[TOOL], tool_choice="none").masked
    assert not recorded(explorer).masked


def test_other_replies_are_not_marked(explorer):
    for body in (
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"min_tokens": 0},
        {"thinking_token_budget": None},
        {"thinking_token_budget": -1},
        {"tools": [TOOL], "tool_choice": "auto"},
    ):
        assert not recorded(explorer, **body).masked, body


def test_forced_tokens_weigh_one(model, tmp_path):
    """They were sampled with the probability 1, and the trainer's policy gives them less."""
    sure = [
        replace(row, tokens=replace(row.tokens, logprobs=row.tokens.logprobs * 0))
        for row in make_experiences(model, 16)
    ]
    forced = [replace(row, sampling=Sampling(masked=True)) for row in sure]
    weights = [
        train(tmp_path / name, model, rows)[1]["importance_weight"] for name, rows in (("f", forced), ("s", sure))
    ]
    assert weights[0] == pytest.approx(1.0)
    assert weights[1] < 0.5


def test_a_row_sampled_with_what_no_sampler_takes_is_quarantined(explorer):
    explorer.http.post("/feedback", json={"msg_ids": [recorded(explorer).msg_id], "reward": 1})
    with explorer.ledger.write() as connection:
        connection.exec_driver_sql("UPDATE experiences SET repetition_penalty = 0")
        transitions.commit(connection)
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=8, lease_s=60)
        lease = queries.load_lease(connection, batch)
    assert list(lease.corrupt.values()) == ["repetition_penalty=0.0 is not above 0"]
