"""Blocks of a run: entered in an evaluation, in learn, several times, inside one another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import flywheel
import httpx
import openai
import pytest
from flywheel.transport import current_run

from tests.sdk.conftest import TASKS, learn, rows, said, say, say_async


@pytest.mark.parametrize("child", [False, True])
def test_a_workflow_that_enters_its_run_is_evaluated_pinned_and_unrecorded(explorer, scripted_engine, child):
    http = flywheel.async_http_client()  # of a model that outlives runs

    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        async with run.child("a") if child else run as own:
            await say_async(own.model)
            body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
            (await http.post(f"{explorer.url}/v1/chat/completions", json=body)).raise_for_status()
            own.reward(1.0)
        own.reward(0.5)
        return 1.0

    given: dict[str, Any] = {"model": 0, "url": explorer.url, "at_once": 1, "params": {"temperature": 0.25}}
    found = flywheel.evaluate(workflow, TASKS[:2], **given)
    assert (found.n, found.mean, found.failures) == (2, 1.0, {})
    assert (rows(explorer), said(explorer)) == ([], [])
    assert [body["temperature"] for body in scripted_engine.script.bodies] == [0.25] * 4


def test_params_of_learn_reach_a_model_object_that_outlives_runs(explorer, scripted_engine, tmp_path):
    url = f"{explorer.url}/v1"
    with openai.OpenAI(base_url=url, api_key="k", http_client=flywheel.http_client(), max_retries=0) as client:

        def workflow(task: Any) -> float:
            client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
            client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}], temperature=0.2)
            return 1.0

        report = learn(explorer, tmp_path, workflow, TASKS[:2], params={"temperature": 0.5}, at_once=1)
    assert (report.rewarded, len(rows(explorer))) == (2, 4)
    assert [body["temperature"] for body in scripted_engine.script.bodies] == [0.5, 0.2] * 2


def test_a_run_left_twice_is_rewarded_by_its_last_reward(client, explorer):
    run = client.run("game")
    for reward in (0.25, 0.5):
        with run:
            say(run.model)
            run.reward(reward)
    assert [row.reward for row in rows(explorer)] == [0.5, 0.5]


@pytest.mark.parametrize("child", [False, True])
def test_the_same_reward_again_reaches_the_chats_of_a_second_block(client, explorer, child):
    run = client.run("game")
    own = run.child("wolf") if child else run
    for _ in range(2):
        with run:
            say(own.model)
            own.reward(0.5)
    assert [row.reward for row in rows(explorer)] == [0.5, 0.5]


def test_what_was_said_in_a_child_s_block_is_sent_with_its_parent(client, explorer):
    with client.run("game") as game:
        wolf, other = game.child("wolf"), game.child("other")
        with wolf:
            reply = say(client.model())
            wolf.reward(-1.0, of=reply.id)
        assert said(explorer) == []
        with other:
            say(client.model())
        wolf.reward(1.0)
        other.reward(0.5)
    assert [(row.outcome, row.turn_reward) for row in rows(explorer)] == [(1.0, -1.0), (0.5, None)]


def test_a_child_of_a_run_that_is_never_entered_is_sent_at_its_own_end(client, explorer):
    with client.run("game").child("wolf") as wolf:
        say(wolf.model)
        wolf.reward(0.5)
    assert [row.reward for row in rows(explorer)] == [0.5]


def test_a_block_inside_another_one_of_the_same_run_sends_nothing(client, explorer):
    with client.run() as run:
        with run:
            say(client.model())
            run.reward(0.25)
        assert said(explorer) == []
        say(client.model())
        run.reward(0.5)
    assert [row.reward for row in rows(explorer)] == [0.5, 0.5]


@pytest.mark.parametrize("child", [False, True])
def test_a_workflow_may_reward_a_turn_inside_a_block_and_the_run_after_it(explorer, tmp_path, child):
    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        async with run.child("a") if child else run as own:
            own.reward(-1.0, of=(await say_async(own.model)).id)
        own.reward(1.0)
        return 1.0

    report = learn(explorer, tmp_path, workflow)
    assert (report.rewarded, report.failures) == (len(TASKS), {})
    assert {row.outcome for row in rows(explorer)} == {1.0}


@pytest.mark.parametrize("child", [False, True])
def test_what_a_failed_attempt_said_in_a_block_is_never_sent(explorer, tmp_path, child):
    failed = []

    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        async with run.child("a") if child else run as own:
            own.reward(0.25, of=(await say_async(own.model)).id)
        if task not in failed:
            failed.append(task)
            raise RuntimeError("the next step failed")
        return 1.0

    learn(explorer, tmp_path, workflow, TASKS[:1])
    assert [row.turn_reward for row in rows(explorer)] == [None, 0.25]


def test_what_a_failed_attempt_left_running_says_is_never_sent(explorer, tmp_path):
    failed, ended = asyncio.Event(), asyncio.Event()

    async def player(run: flywheel.AsyncRun, name: str, *, fails: bool) -> None:
        async with run.child(name) as own:
            await say_async(own.model)
            if fails:
                failed.set()
                raise RuntimeError("the move is not allowed")
            await failed.wait()
            await asyncio.sleep(0)  # the attempt has failed: gather does not end this player
            own.reward(0.25)
            async with run.child(f"{name}-later") as later:
                await say_async(later.model)
                later.reward(0.125)
        ended.set()

    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        if not failed.is_set():
            await asyncio.gather(player(run, "a", fails=True), player(run, "b", fails=False))
        await ended.wait()
        await say_async(model)
        return 1.0

    learn(explorer, tmp_path, workflow, TASKS[:1])
    assert [row.reward for row in rows(explorer)] == [None, None, None, 1.0]


def test_what_an_attempt_left_running_whose_credit_function_failed_says_is_never_sent(explorer, tmp_path):
    left: list[asyncio.Task[None]] = []
    dropped = asyncio.Event()

    async def late(run: flywheel.AsyncRun) -> None:
        await dropped.wait()
        async with run.child("late") as own:
            await say_async(own.model)
            own.reward(0.25)

    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        if left:
            dropped.set()
            await left[0]
        else:
            left.append(asyncio.create_task(late(run)))
        await say_async(model)
        return 1.0

    def credit(reward: float, msg_ids: Sequence[str]) -> list[float]:
        if not dropped.is_set():
            raise ValueError("no shares")
        return [reward]

    learn(explorer, tmp_path, workflow, TASKS[:1], credit=credit)
    assert sorted(row.reward or 0.0 for row in rows(explorer)) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("none", [{"reward": None}, flywheel.Reward(None), flywheel.Result(response="x")])
def test_no_reward_for_a_run_is_no_error(explorer, tmp_path, none):
    async def workflow(task: Any, model: flywheel.Model) -> Any:
        await say_async(model)
        return none

    report = learn(explorer, tmp_path, workflow)
    assert (report.stopped, report.runs, report.rewarded, said(explorer)) == ("done", len(TASKS), 0, [])


def test_a_reward_of_none_is_not_sent(client, explorer):
    with client.run() as run:
        reply = say(client.model())
        run.reward(None)
        run.reward(0.5, of=reply.id)
    assert [row.turn_reward for row in rows(explorer)] == [0.5]


def test_the_explorer_is_reached_without_the_proxy_of_the_environment(explorer, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with flywheel.Client(explorer.url, retry_s=0) as client, client.run() as run:
        say(run.model)
        run.reward(0.5)
    with pytest.raises(httpx.TransportError):
        httpx.get(explorer.url)
    assert [row.reward for row in rows(explorer)] == [0.5]


@pytest.mark.parametrize("child", [False, True])
def test_an_evaluation_refuses_a_run_s_path_which_can_pin_no_version(explorer, child):
    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        return float(bool((run.child("a") if child else run).path_url))

    with pytest.raises(flywheel.ConfigError, match="path_url"):
        flywheel.evaluate(workflow, TASKS[:1], model=0, url=explorer.url)


def test_metrics_with_names_of_several_types_are_sent(client, explorer):
    with client.run() as run:
        say(run.model)
        run.reward(0.5, metrics={"steps": 4, 1: 0.5})  # type: ignore[dict-item]
    assert [row.reward for row in rows(explorer)] == [0.5]


def test_a_comment_that_is_no_text_is_a_config_error(client):
    with pytest.raises(flywheel.ConfigError, match="no JSON"), client.run() as run:
        say(run.model)
        run.reward(0.5, comment=ValueError("x"))  # type: ignore[arg-type]


def test_blocks_of_one_run_in_two_threads_leave_no_run_behind(client, explorer):
    run, both = client.run("game"), threading.Barrier(2, timeout=60)
    left: list[object] = []

    def block(first: bool) -> None:
        if not first:
            both.wait()  # until the other one is inside
        with run:
            say(client.model())
            if first:
                both.wait()
            both.wait()
        left.append(current_run.get())

    threads = [threading.Thread(target=block, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert left == [None, None]
    assert len(rows(explorer)) == 2
