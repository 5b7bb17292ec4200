"""Agents' frameworks, unchanged, on the explorer and the real engine: each run becomes one linked trajectory.

The programs of tests/clients run in an environment of their own, `make clients`, and know nothing but a base URL. Each
runs three agents side by side that say the same first message; each agent calls two tools at once and then sums up.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from sqlalchemy import select

from shared.config import TrainerConfig
from shared.experience import Tokens
from shared.ledger.connect import Ledger
from shared.ledger.prefix import load_tokens
from shared.ledger.tables import experiences, payloads, signals
from shared.reward import Signal
from tests.e2e.conftest import Live
from tests.support.processes import REPOSITORY, run_here
from tests.support.tool_model import CITIES, GREETING, SUMMARY
from trainer_service.answers import answer_tokenizer
from trainer_service.learner import harmless_row

pytestmark = pytest.mark.engine
CLIENTS = REPOSITORY / "tests" / "clients"
PROGRAMS = REPOSITORY / ".venv-clients" / "bin"
AGENTSCOPE_1 = REPOSITORY / ".venv-clients" / "agentscope-1"  # the line that has a ReActAgent
RUNS = 3
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather today?"}
ROUTE_IT: Any = {"role": "user", "content": "please use the desk to route"}


@pytest.fixture
def base_url(tools_live: Live) -> str:
    return f"{str(tools_live.http.base_url).rstrip('/')}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as opened:
        yield opened


def recorded(live: Live, after: int = 0) -> list[Any]:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        query = select(experiences, payloads).join(payloads).where(experiences.c.id > after)
        found = list(connection.execute(query.order_by(experiences.c.id)))
    ledger.close()
    return found


def tokens_of(live: Live, row: Any) -> Tokens:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        tokens = load_tokens(connection, [row.id])[row.id]
    ledger.close()
    assert isinstance(tokens, Tokens)
    return tokens


def kinds_said(live: Live, msg_id: str) -> list[str]:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        said = select(signals.c.kind).where(signals.c.msg_id == msg_id).order_by(signals.c.id)
        found = list(connection.execute(said).scalars())
    ledger.close()
    return found


def run_client(program: str, base_url: str) -> list[str]:
    """A program's answers."""
    runner = "node" if program.endswith(".mjs") else "python"
    assert (PROGRAMS / runner).exists(), "the clients are not installed: run `make clients`"
    ended = subprocess.run(
        [PROGRAMS / runner, CLIENTS / program, base_url, str(RUNS)],
        env={**os.environ, "PYTHONPATH": str(AGENTSCOPE_1) if program == "agentscope_react.py" else ""},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=CLIENTS,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.strip().splitlines()


@pytest.mark.parametrize(
    ("program", "rewrites"),
    [
        ("openai_node.mjs", False),
        ("langchain_agent.py", False),
        ("openai_agents_sdk.py", False),
        ("litellm_agent.py", False),
        ("agentscope_react.py", False),
        ("agentscope_agent.py", True),  # moves a reminder along at the end of its messages
    ],
)
def test_runs_side_by_side_are_one_linked_trajectory_each(tools_live, base_url, program, rewrites):
    last = max((row.id for row in recorded(tools_live)), default=0)
    assert run_client(program, base_url) == [SUMMARY] * RUNS
    rows = recorded(tools_live, last)
    assert len(rows) == 2 * RUNS
    firsts = {row.msg_id: row for row in rows if row.parent_id is None}
    seconds = [row for row in rows if row.parent_id is not None]
    assert {row.parent_id for row in seconds} == set(firsts)
    assert len({row.conversation_id for row in rows}) == RUNS
    for row in seconds:
        first = firsts[row.parent_id]
        assert row.conversation_id == first.conversation_id
        assert (row.version, row.state, row.reason) == (0, "RECORDED", None)
        before, after = (tokens_of(tools_live, one).prompt_ids.tolist() for one in (first, row))
        assert rewrites or after[: len(before)] == before, "a turn's prompt extends the last one's"
        assert rewrites or row.prefix_of == first.id, "what both share is stored once"
    receipts = tools_live.http.post(
        "/feedback", json={"msg_ids": [seconds[0].msg_id], "reward": 1.0, "scope": "conversation"}
    ).json()["receipts"]
    assert {receipt["msg_id"] for receipt in receipts} == {seconds[0].msg_id, seconds[0].parent_id}


def test_runs_of_a_framework_that_makes_text_of_tool_calls_are_one_conversation_each(tools_live, base_url):
    """smolagents: turns with tools, one without them when no step is left. What it sends back has no tool calls.

    Of a reply whose tool calls have wrong arguments it sends nothing back: the next turn continues the one before.
    """
    last = max((row.id for row in recorded(tools_live)), default=0)
    run_client("smolagents_agent.py", base_url)
    conversations = defaultdict(list)
    for row in recorded(tools_live, last):
        conversations[row.conversation_id].append(row)
    assert len(conversations) == RUNS
    for name, turns in conversations.items():
        assert len(turns) > 2
        assert (turns[0].msg_id, turns[0].parent_id, turns[0].finish_reason) == (name, None, "tool_calls")
        for position, turn in enumerate(turns[1:], 1):
            sent_back = [earlier for earlier in turns[:position] if is_sent_back(earlier, turn)]
            assert turn.parent_id == sent_back[-1].msg_id


def is_sent_back(earlier: Any, turn: Any) -> bool:
    """Whether a turn's request holds an earlier turn's reply: the ids of its calls, or its text."""
    reply = json.loads(earlier.reply)
    said = [call["id"] for call in reply.get("tool_calls") or []] + [reply["content"] or ""]
    history = [part["text"] for message in json.loads(turn.request)["messages"] for part in message["content"]]
    return any(trace and trace in text for trace in said for text in history)


def test_openai_calls_tools_in_parallel_streaming_or_not(tools_live, client):
    whole = client.chat.completions.create(model="agent", messages=[QUESTION], tools=[WEATHER]).choices[0]
    assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(model="agent", messages=[QUESTION], tools=[WEATHER]) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
        assert arguments == [{"city": city} for city in CITIES]
    assert len({call.id for choice in (whole, streamed) for call in choice.message.tool_calls}) == 4


class Desk(pydantic.BaseModel):
    desk: Literal["billing", "shipping"]
    urgent: bool


def test_openai_parses_structured_output(tools_live, client):
    reply = client.chat.completions.parse(model="agent", messages=[ROUTE_IT], response_format=Desk, max_tokens=60)
    assert reply.choices[0].message.parsed == Desk(desk="billing", urgent=True)
    assert recorded(tools_live)[-1].msg_id == reply.id


def test_without_tools_the_same_model_greets(tools_live, client):
    assert client.chat.completions.create(model="agent", messages=[QUESTION]).choices[0].message.content == GREETING


def test_a_correction_has_the_tokens_that_the_engine_samples_for_that_reply(tools_live, client):
    chat = client.chat.completions.create(model="agent", messages=[QUESTION])
    sampled = tokens_of(tools_live, recorded(tools_live)[-1])
    settings = TrainerConfig(algorithm="sft")
    answers = answer_tokenizer(settings, Path(tools_live.config.model.path), vocabulary=10**6, context=None)
    said = (Signal("correction", text=chat.choices[0].message.content),)
    other = replace(sampled, reply_ids=sampled.reply_ids[:1], logprobs=sampled.logprobs[:1])
    (row,) = answers.with_corrections([replace(harmless_row(), tokens=other, signals=said)])
    assert row.correction.tolist() == sampled.reply_ids.tolist()


def test_an_imported_demonstration_has_the_tokens_of_the_same_chat(tools_live, client, tmp_path):
    chat = client.chat.completions.create(model="agent", messages=[QUESTION])
    last = recorded(tools_live)[-1]
    assert last.msg_id == chat.id
    said = {"role": "assistant", "content": chat.choices[0].message.content}
    file = tmp_path / "demonstrations.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION, said]}))
    assert run_here(tools_live.config, "import", str(file), "--reward", "1") == 0
    imported = recorded(tools_live, last.id)[-1]
    sampled, brought = tokens_of(tools_live, last), tokens_of(tools_live, imported)
    assert brought.prompt_ids.tolist() == sampled.prompt_ids.tolist()
    assert brought.reply_ids.tolist() == sampled.reply_ids.tolist()
    assert (imported.reward, imported.state, last.version) == (1.0, "RECORDED", imported.version)
    assert kinds_said(tools_live, imported.msg_id) == ["demonstration", "reward"]
    assert -3 < brought.logprobs.sum() < 0, "at temperature 1 the model is nearly as sure of it"
