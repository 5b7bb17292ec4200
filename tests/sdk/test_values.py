"""Values as users' programs have them, and what is left as it was."""

from __future__ import annotations

import signal

import flywheel
import numpy as np
import pytest
from flywheel.reward import read_reward
from flywheel.wire import encode, feedback_body

from tests.sdk.conftest import TASKS, learn, rows, say


def test_the_numbers_of_a_reward_may_be_of_numpy():
    found = read_reward(flywheel.Reward(np.float32(0.5), {"steps": np.int64(3)}))  # type: ignore[arg-type, dict-item]
    assert found is not None
    assert [type(value) for value in (found.value, found.metrics["steps"])] == [float, float]


@pytest.mark.parametrize("number", [np.float64(1), np.float32(1), np.int64(1), np.bool_(True)])
def test_a_run_s_reward_may_be_a_number_of_numpy(number):
    run = flywheel.Client("http://127.0.0.1:9").run("t")
    run.reward(number, metrics={"steps": number})
    [(_, body)] = run.feedback()
    assert encode(body) == b'{"task_id":"t","run_id":"0","reward":1.0,"metrics":{"steps":1.0}}'


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

    before = signal.signal(signal.SIGINT, own)
    try:
        learn(explorer, tmp_path, tasks=TASKS[:1])
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
