"""Agents of each framework inside runs of the agent's side, with tool turns, on the explorer and the real engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter, defaultdict
from typing import Any

import flywheel
import openai
import pytest

from tests.e2e.test_4_frameworks import QUESTION, WEATHER, kinds_said, recorded
from tests.sdk.frameworks import CLIENTS, FRAMEWORKS, run_framework
from tests.sdk.test_client import answering
from tests.support.forms import FULL
from tests.support.processes import REPOSITORY, run_here

pytestmark = pytest.mark.engine
RUNS = 32 if FULL else 8


@pytest.mark.parametrize("framework", FRAMEWORKS if FULL else ["agentscope_2", "openai_agents"])
def test_runs_at_once_with_tool_turns_do_not_mix(tools_live, framework):
    last = max((row.id for row in recorded(tools_live)), default=0)
    found = run_framework(framework, str(tools_live.http.base_url), RUNS)
    rows = recorded(tools_live, last)
    by_task = defaultdict(list)
    for row in rows:
        by_task[row.task_id].append(row.msg_id)
        assert row.reward == int(row.task_id.rpartition("-")[2])
    assert {task: sorted(ids) for task, ids in by_task.items()} == {task: sorted(ids) for task, ids in found.items()}
    assert len(found) == RUNS
    assert min(map(len, found.values())) >= 2, "each run has a turn that calls tools and one that sums up"


def test_node_programs_at_once_belong_to_the_runs_of_their_environments(tools_live):
    """Each makes two agents' runs of two turns, and knows a base URL alone."""
    last = max((row.id for row in recorded(tools_live)), default=0)
    url = str(tools_live.http.base_url)

    async def one(client: flywheel.AsyncClient, number: int) -> None:
        async with client.run(f"node-{number}") as run:
            program = [CLIENTS / "bin/node", REPOSITORY / "tests/clients/openai_node.mjs", run.env()["OPENAI_BASE_URL"]]
            process = await asyncio.create_subprocess_exec(*program, "2", stdout=subprocess.DEVNULL)
            assert await process.wait() == 0
            run.reward(number)

    async def all_of_them() -> None:
        async with flywheel.AsyncClient(url) as client:
            await asyncio.gather(*(one(client, number) for number in range(RUNS)))

    asyncio.run(all_of_them())
    rows = recorded(tools_live, last)
    assert Counter(row.task_id for row in rows) == {f"node-{number}": 4 for number in range(RUNS)}
    assert all(row.reward == int(row.task_id.removeprefix("node-")) for row in rows)


def told_by_another_provider(number: int, request: Any) -> Any:
    """First a tool call, then an answer."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said = {"content": None, "tool_calls": [call]} if number == 0 else {"content": "It is sunny in Paris."}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **said}}
    reply = {"id": f"other-{number}", "object": "chat.completion", "created": 1, "model": "other", "choices": [choice]}
    return 200, {"Content-Type": "application/json"}, json.dumps(reply).encode()


def test_what_a_collector_wrote_of_another_provider_is_imported_with_what_was_said_of_it(tools_live, tmp_path):
    messages: list[Any] = [QUESTION]
    with answering(told_by_another_provider) as url, flywheel.Collector(tmp_path / "log.jsonl") as collector:
        http = collector.http_client()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", http_client=http) as provider:
            first = provider.chat.completions.create(model="other", messages=messages, tools=[WEATHER])
            messages += [first.choices[0].message.to_dict()]
            messages += [{"role": "tool", "tool_call_id": "call_1", "content": "Paris: sunny"}]
            second = provider.chat.completions.create(model="other", messages=messages, tools=[WEATHER])
        collector.reward(second.id, task_completion=0.75, efficiency=0.5)
        collector.feedback(second.id, rating="up", comment="quick")
        assert collector.export(tmp_path / "rows.jsonl") == 2
    last = max((row.id for row in recorded(tools_live)), default=0)
    assert run_here(tools_live.config, "import", str(tmp_path / "rows.jsonl")) == 0
    asked, answered = recorded(tools_live, last)
    assert (asked.msg_id, asked.reward) == ("other-0", None)
    assert (answered.msg_id, answered.reward, answered.parent_id) == ("other-1", 1.25, "other-0")
    assert json.loads(answered.reply)["content"] == "It is sunny in Paris."
    assert kinds_said(tools_live, "other-0") == ["demonstration"]
    assert kinds_said(tools_live, "other-1") == ["metric", "metric", "reward", "rating", "comment"]


def test_learn_and_evaluate_on_the_real_engine(tools_live, tmp_path):
    async def greet(task, model):
        async with model.async_openai() as openai:
            said = [{"role": "user", "content": "What is the weather today?"}]
            reply = await openai.chat.completions.create(model=model.name, messages=said, max_tokens=8)
        return len(reply.choices[0].message.content or "") > 0

    url = str(tools_live.http.base_url)
    tasks = [{"n": n} for n in range(4)]
    last = max((row.id for row in recorded(tools_live)), default=0)
    report = flywheel.learn(greet, tasks, url=url, folder=tmp_path, eval_tasks=tasks[:1], progress=False)
    assert (report.runs, report.reward_last) == (4, 1.0)
    assert report.evaluations[0].mean == 1.0
    assert len(recorded(tools_live, last)) == 4
