"""Chats of judges and graders: they belong to no run, whichever way their model names the explorer."""

from __future__ import annotations

import json
from typing import Any

import flywheel
import pytest
from flywheel.rewards import from_openai_grader

from tests.sdk.conftest import TASKS, learn, rows, say, say_async

VERDICT = json.dumps({"quality": {"reason": "", "score": 5}, "result": 1.0})
GRADER = {"type": "score_model", "input": "Score {{ sample.output_text }}"}
WAYS = ["client", "address", "address and parameters"]


def judges_by(way: str, client: flywheel.Client) -> flywheel.Model:
    """The version 0 as the model of a judge."""
    if way == "client":
        return client.model(0, temperature=0.5)
    params = {"temperature": 0.5} if way != "address" else {}
    return flywheel.Model.of(f"{client.url}/v1", "agent@0", key="k", **params)


def judge_of(kind: str, model: flywheel.Model) -> Any:
    return flywheel.LLMJudge(model, "Is it good?") if kind == "judge" else from_openai_grader(GRADER, model=model)


async def answers(task: Any, model: flywheel.Model) -> str:
    return str((await say_async(model)).choices[0].message.content)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["judge", "grader"])
def test_chats_of_a_judge_of_learn_are_not_the_run_s(explorer, client, scripted_engine, tmp_path, kind, way):
    scripted_engine.script.message = {"content": VERDICT}
    seen: list[list[str]] = []

    def credit(reward: float, msg_ids: Any) -> list[float]:
        seen.append(list(msg_ids))
        return [reward] * len(msg_ids)

    judge = judge_of(kind, judges_by(way, client))
    report = learn(explorer, tmp_path, answers, TASKS[:2], judge=judge, credit=credit)
    assert (report.rewarded, report.failures) == (2, {})
    assert [(row.reward, row.version) for row in rows(explorer)] == [(1.0, 0)] * 2
    assert [len(ids) for ids in seen] == [1, 1]
    assert len(scripted_engine.script.bodies) == 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["judge", "grader"])
def test_chats_of_a_judge_of_an_evaluation_are_its_own_model_s(explorer, client, scripted_engine, kind, way):
    scripted_engine.script.message = {"content": VERDICT}
    judge = judge_of(kind, judges_by(way, client))
    options: dict[str, Any] = {"model": 0, "url": explorer.url, "judge": judge, "params": {"temperature": 0.25}}
    found = flywheel.evaluate(answers, TASKS[:1], **options)
    assert (found.mean, found.failures, rows(explorer)) == (1.0, {}, [])
    temperatures = [body.get("temperature") for body in scripted_engine.script.bodies]
    assert temperatures == [0.25, None if way == "address" else 0.5]


def test_a_judge_in_a_shadow_run_is_neither_recorded_nor_guarded(explorer, client, scripted_engine):
    scripted_engine.script.message = {"content": VERDICT}
    flywheel.declare("refund_of_the_judged", read_only=False)
    judge = judge_of("judge", judges_by("address and parameters", client))

    async def score(run: flywheel.Run, reply: str) -> float:
        return (await judge.ajudge("question", reply)).reward

    def agent(request: str, model: flywheel.Model | None) -> str:
        return "production" if model is None else str(say(model).id)

    runner = flywheel.TrainingRunner(explorer.url, reward=score, select=flywheel.SamplingRate(1.0))
    with runner:
        runner.watch(agent)("hello")
    assert (runner.stats.rewarded, runner.stats.reward_mean) == (1, 1.0), runner.stats
    assert [row.reward for row in rows(explorer)] == [1.0]


@pytest.mark.parametrize("kind", ["judge", "grader"])
def test_the_trainee_may_not_judge_itself_by_its_address(explorer, client, scripted_engine, tmp_path, kind):
    scripted_engine.script.message = {"content": VERDICT}
    judge = judge_of(kind, flywheel.Model.of(f"{client.url}/v1", "agent", key="k"))
    with pytest.raises(flywheel.ConfigError, match="the trainee would judge itself"):
        learn(explorer, tmp_path, answers, TASKS[:1], judge=judge)
    assert [row.reward for row in rows(explorer)] == [None]


def test_a_judge_that_is_asked_in_a_run_s_block_leaves_the_block_its_run(explorer, client, scripted_engine):
    scripted_engine.script.message = {"content": VERDICT}
    judge = judge_of("judge", judges_by("address", client))
    with client.run("judged") as run:
        say(client.model())
        run.reward(judge.judge("question", "answer").reward)
        say(client.model())
    assert [(row.task_id, row.reward) for row in rows(explorer)] == [("judged", 1.0)] * 2
