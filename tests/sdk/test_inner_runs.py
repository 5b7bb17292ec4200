"""Runs that an agent begins by itself, inside a shadow run, an evaluation or learn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import flywheel
import httpx
import pytest

from tests.sdk.conftest import TASKS, learn, rows, said, say, say_async

EVERY = flywheel.SamplingRate(1.0)
POLICIES = [flywheel.ReadOnlyTools(), flywheel.RecordedTools(), flywheel.SubstituteTools({})]
_names = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A tool's name that nothing was declared of."""
    yield f"inner_refund_{next(_names)}"


def shadow(explorer: Any, agent: Any, **options: Any) -> flywheel.Stats:
    """One shadow run beside one call of production, whose request is "r1"."""
    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run, reply: 0.5, select=EVERY, **options)
    with runner:
        runner.watch(agent)("r1")
    return runner.stats


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_run_that_an_agent_begins_in_a_shadow_run_guards_its_tools(explorer, client, name, policy, child):
    done: list[str] = []

    @flywheel.tool(read_only=False, name=name)
    def refund(order: str) -> str:
        done.append(order)
        return "refunded"

    def agent(request: str, model: flywheel.Model | None) -> str:
        if model is None:
            return refund("A1")
        say(model)
        run = client.run(request)
        with run.child("a") if child else run:
            return refund("B2")

    stats = shadow(explorer, agent, tools=policy)
    assert done == ["A1"], "production's own"
    is_attempt = isinstance(policy, flywheel.RecordedTools)
    assert (stats.unsafe, stats.rewarded) == (0 if is_attempt else 1, 1 if is_attempt else 0)


@pytest.mark.parametrize("way", ["model", "child", "context", "never entered"])
def test_chats_of_a_run_that_an_agent_begins_in_a_shadow_run_are_checked(explorer, client, scripted_engine, name, way):
    offered: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]

    def agent(request: str, model: flywheel.Model | None) -> str:
        if model is None:
            return "production"
        run = client.run(request)
        chosen = {"context": client.model(), "child": run.child("a").model}.get(way, run.model)
        if way == "never entered":
            return ask(chosen)
        with run:
            return ask(chosen)

    def ask(model: flywheel.Model) -> str:
        with model.openai(max_retries=0) as openai:
            said: Any = [{"role": "user", "content": "hi"}]
            return openai.chat.completions.create(model="agent", messages=said, tools=offered).id

    stats = shadow(explorer, agent)
    assert (stats.unsafe, scripted_engine.script.bodies) == (1, []), stats


def test_a_run_that_an_agent_begins_is_recorded_and_rewarded_in_production_alone(explorer, client, scripted_engine):
    http = flywheel.http_client()

    def agent(request: str, model: flywheel.Model | None) -> str:
        with client.run(request, "0") as run:
            say(run.model if model is None else model, "by the model")
            say(run.model), say(run.child("a").model), say(client.model())
            post(http, explorer)
            run.reward(1.0 if model is None else -1.0)
        return ""

    with http:
        stats = shadow(explorer, agent)
    assert (stats.rewarded, stats.failed) == (1, {}), stats
    replay = [row for row in rows(explorer) if row.task_id != "r1"]
    assert [row.reward for row in replay] == [0.5], "the chat of the model that it got"
    assert {row.reward for row in rows(explorer) if row.task_id == "r1" and row.run_id == "0"} == {1.0}
    assert len(rows(explorer)) == 5 + 1
    assert -1.0 not in {signal.value for signal in said(explorer)}
    assert len(scripted_engine.script.bodies) == 5 + 5


def post(http: httpx.Client, explorer: Any) -> None:
    """A chat of a model object that outlives runs."""
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    http.post(f"{explorer.url}/v1/chat/completions", json=body).raise_for_status()


def test_a_run_that_an_agent_begins_in_a_shadow_run_has_no_path_that_would_be_recorded(explorer, client):
    def agent(request: str, model: flywheel.Model | None) -> str:
        return "production" if model is None else client.run(request).path_url

    stats = shadow(explorer, agent)
    assert (stats.failed["ConfigError"], "run.path_url" in str(stats.last_error)) == (1, True), stats


def test_a_run_of_production_cannot_be_entered_by_a_shadow_run(explorer, client):
    production = client.run("production", "0")

    def agent(request: str, model: flywheel.Model | None) -> str:
        with production:
            say(production.model)
        return ""

    stats = shadow(explorer, agent)
    assert (stats.failed["ConfigError"], "begin it inside" in str(stats.last_error)) == (1, True), stats
    assert [(row.task_id, row.run_id) for row in rows(explorer)] == [("production", "0")]
    assert (production.guard, production.pinned) == (None, None)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_a_workflow_begins_in_an_evaluation_is_pinned_and_unrecorded(
    explorer, client, scripted_engine, is_async
):
    def workflow(task: Any, model: flywheel.Model) -> float:
        with client.run(f"own {task['n']}") as run:
            say(model), say(run.model), say(run.child("a").model), say(client.model())
            run.reward(1.0)
        return 1.0

    async def asynchronous(task: Any, model: flywheel.Model) -> float:
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(flywheel.AsyncClient(explorer.url))
            run = await stack.enter_async_context(own.run(f"own {task['n']}"))
            for one in (model, run.model, run.child("a").model, own.model()):
                await say_async(one)
            run.reward(1.0)
        return 1.0

    options: dict[str, Any] = {"model": 0, "url": explorer.url, "params": {"temperature": 0.25}}
    found = flywheel.evaluate(asynchronous if is_async else workflow, TASKS[:2], **options)
    assert (found.mean, found.failures) == (1.0, {})
    assert (rows(explorer), said(explorer)) == ([], [])
    bodies = scripted_engine.script.bodies
    assert [(body["temperature"], body["store"]) for body in bodies] == [(0.25, False)] * 8
    assert workflow(TASKS[0], client.model()) == 1.0
    assert len(rows(explorer)) == 4, "outside of an evaluation it is recorded"


def test_a_run_that_a_workflow_begins_in_an_evaluation_of_another_model_asks_that_one(
    explorer, client, scripted_engine
):
    def workflow(task: Any, model: flywheel.Model) -> float:
        with client.run() as run, run.model.openai() as asked:
            names.append((run.model.base_url, str(asked.base_url)))
        return 1.0

    names: list[tuple[str, str]] = []
    other = flywheel.Model.of(f"{scripted_engine.url}/v1", "strong", key="k")
    assert flywheel.evaluate(workflow, TASKS[:1], model=other, url=explorer.url).mean == 1.0
    assert names == [(other.base_url, f"{other.base_url}/")]


def test_a_run_of_another_block_cannot_be_entered_by_an_evaluation(explorer, client):
    outer = client.run("outer")

    def workflow(task: Any) -> float:
        with outer:
            return 1.0

    with pytest.raises(flywheel.ConfigError, match="begin it inside"):
        flywheel.evaluate(workflow, TASKS[:1], model=0, url=explorer.url)


def test_a_run_that_a_workflow_of_learn_begins_is_one_of_its_own(explorer, client, tmp_path):
    def workflow(task: Any, model: flywheel.Model) -> float:
        say(model)
        with client.run(f"own {task['n']}") as run:
            say(run.model)
            run.reward(-1.0)
        return 1.0

    learn(explorer, tmp_path, workflow, TASKS[:1])
    assert {(row.task_id.partition("/")[0], row.reward) for row in rows(explorer)} == {("own 0", -1.0), ("learn", 1.0)}


def test_a_workflow_of_learn_whose_chats_are_all_in_a_run_of_its_own_is_told_which_model_to_use(
    explorer, client, tmp_path, caplog
):
    def workflow(task: Any) -> float:
        with client.run() as run:
            say(run.model)
        return 1.0

    report = learn(explorer, tmp_path, workflow, TASKS[:1], retries=0, max_failed_share=1.0)
    assert report.failures == {"NothingRecorded": 1}
    assert "another run by client.run()" in caplog.text and "run.child()" in caplog.text
