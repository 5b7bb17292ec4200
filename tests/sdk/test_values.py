"""Values as users' programs have them, and what is left as it was."""

from __future__ import annotations

import asyncio
import signal
from decimal import Decimal

import flywheel
import numpy as np
import pytest
from flywheel.journal import read_lines
from flywheel.reward import read_reward
from flywheel.wire import encode, feedback_body

from tests.sdk.conftest import COLLECT, TASKS, count, learn, rows, say


def test_the_numbers_of_a_reward_may_be_of_numpy():
    found = read_reward(flywheel.Reward(np.float32(0.5), {"steps": np.int64(3)}))  # type: ignore[arg-type, dict-item]
    assert found is not None
    assert [type(value) for value in (found.value, found.metrics["steps"])] == [float, float]


@pytest.mark.parametrize("number", [np.float64(1), np.float32(1), np.int64(1), np.bool_(True)])
def test_a_run_s_reward_may_be_a_number_of_numpy(number):
    run = flywheel.Client("http://127.0.0.1:9").run("t", "0")
    run.reward(number, metrics={"steps": number})
    [(_, body)] = run.feedback()
    assert encode(body) == b'{"task_id":"t","run_id":"0","reward":1.0,"metrics":{"steps":1.0}}'


def says_it(task, model, run):
    say(model)
    run.reward(np.float32(1), metrics={"steps": np.int64(4), "won": np.bool_(True)})


def says_metrics_after_it(task, model, run):
    says_it(task, model, run)
    return flywheel.Result(response="x", metrics={"steps": np.float32(4), "won": Decimal(1)})


def returns_metrics_for_a_judge(task, model):
    say(model)
    return flywheel.Result(response="x", metrics={"steps": np.int64(4), "won": np.bool_(True)})


@pytest.mark.parametrize(
    ("workflow", "judge"),
    [(says_it, None), (says_metrics_after_it, None), (returns_metrics_for_a_judge, lambda task, reply: np.float32(1))],
)
def test_learn_and_its_evaluations_take_numbers_of_numpy(explorer, tmp_path, workflow, judge):
    report = learn(explorer, tmp_path, workflow, TASKS[:1], judge=judge, eval_tasks=TASKS[:1])
    assert (report.stopped, report.reward_last) == ("done", 1.0)
    assert {(one.mean, *one.metrics.values()) for one in report.evaluations} == {(1.0, 4.0, 1.0)}
    [ended] = (line for line in read_lines(tmp_path / "runs/journal.jsonl") if line["kind"] == "ended")
    assert ended["metrics"] == {"steps": 4.0, "won": 1.0}


def test_one_message_id_is_a_list_of_one():
    assert feedback_body("m", None, None, {"preferred_over": "other"})["preferred_over"] == ["other"]


def test_chats_of_grandchildren_are_chats_of_a_run(explorer):
    with flywheel.Client(explorer.url) as client, client.run() as run:
        say(run.child("a").child("b").model)


def test_a_result_without_a_reward_has_the_one_that_its_run_was_given(explorer, tmp_path):
    def workflow(task, model, run):
        say(model)
        run.reward(0.75)
        return flywheel.Result(response="done", metrics={"steps": 2.0})

    report = learn(explorer, tmp_path, workflow=workflow, tasks=TASKS[:1])
    assert (report.reward_last, [row.reward for row in rows(explorer)]) == (0.75, [0.75])


def test_a_handler_of_ctrl_c_is_as_before_after_learn(explorer, tmp_path):
    def own(*_: object) -> None:
        """What the program does at Ctrl-C."""

    signal.signal(signal.SIGINT, own)
    learn(explorer, tmp_path, tasks=TASKS[:1])
    assert signal.getsignal(signal.SIGINT) is own


async def test_a_loop_s_handler_of_ctrl_c_is_called_after_alearn(explorer, tmp_path):
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        await flywheel.alearn(count, TASKS[:1], url=explorer.url, folder=tmp_path / "runs", **COLLECT)
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 10)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def test_a_handler_of_ctrl_c_that_is_set_while_alearn_runs_stays(explorer, tmp_path):
    def own(*_: object) -> None:
        """What the program does at Ctrl-C."""

    def sets(task, model):
        say(model)
        asyncio.run_coroutine_threadsafe(set_own(), loop).result()
        return 1.0

    async def set_own() -> None:
        signal.signal(signal.SIGINT, own)

    loop = asyncio.get_running_loop()
    await flywheel.alearn(sets, TASKS[:1], url=explorer.url, folder=tmp_path / "runs", **COLLECT)
    assert signal.getsignal(signal.SIGINT) is own
