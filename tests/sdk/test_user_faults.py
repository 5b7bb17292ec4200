"""What a user's functions do wrong ends one run, which is counted; never the work, and never in silence."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import flywheel
import pytest
from flywheel.journal import read_lines

from tests.sdk.conftest import TASKS, count, learn, rows, said, say, say_async
from tests.support.servers import wait_until
from tests.support.time_limits import limit_when


async def cancelled(*_: Any) -> Any:
    raise asyncio.CancelledError  # as a framework does whose own task was cancelled


def stopped(*_: Any) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("fault", [cancelled, stopped])
def test_a_workflow_that_ends_as_cancelled_or_stopped_is_a_failed_attempt(explorer, tmp_path, fault):
    tries = itertools.count()

    async def workflow(task: Any, model: flywheel.Model) -> Any:
        return await cancelled() if fault is cancelled and next(tries) == 0 else await count(task, model)

    def stopping(task: Any, model: flywheel.Model) -> float:
        say(model)
        return stopped() if next(tries) == 0 else 1.0

    report = learn(explorer, tmp_path, workflow if fault is cancelled else stopping, at_once=1, timeout_s=60)
    assert (report.stopped, report.rewarded, report.dropped) == ("done", len(TASKS), 0)
    assert sum(report.failures.values()) == 1
    assert {row.state for row in rows(explorer) if row.reward is not None} == {"READY"}


def test_a_judge_that_ends_as_cancelled_is_a_failed_attempt(explorer, tmp_path):
    report = learn(explorer, tmp_path, tasks=TASKS[:1], judge=cancelled, retries=0)
    assert (report.stopped, report.dropped) == ("done", 1)


def test_half_a_character_in_a_comment_is_replaced_and_the_run_is_rewarded(explorer, tmp_path):
    """A model's JSON may escape one half of a pair of surrogates, which is no character in UTF-8."""
    judge = lambda task, reply: flywheel.Reward(1.0, {"half \ud83d": 1.0}, "well \ud83d done")  # noqa: E731
    report = learn(explorer, tmp_path, tasks=TASKS[:1], judge=judge)
    assert report.rewarded == 1
    assert [(one.kind, one.name, one.text) for one in said(explorer)] == [
        ("reward", None, None),
        ("metric", "half ?", None),
        ("comment", None, "well ? done"),
    ]


def test_nul_in_a_comment_is_replaced_and_a_long_one_is_cut(explorer, tmp_path):
    """Whatever a model wrote, and however long the output of a tool is."""
    judge = lambda task, reply: flywheel.Reward(1.0, {"a\0b": 1.0}, "a\0b" + "€" * 70_000)  # noqa: E731
    assert learn(explorer, tmp_path, tasks=TASKS[:1], judge=judge).rewarded == 1
    found = said(explorer)
    assert [(one.kind, one.name) for one in found] == [("reward", None), ("metric", "a?b"), ("comment", None)]
    assert found[-1].text == "a?b" + "€" * ((65_536 - 3) // 3)


def test_the_journal_contains_exactly_what_was_sent(explorer, tmp_path):
    """After a crash it is sent again under the same keys, where another body would be refused."""
    shares = itertools.count(1)
    learn(explorer, tmp_path, tasks=TASKS[:1], credit=lambda reward, ids: [float(next(shares)) for _ in ids])
    (ended,) = (line for line in read_lines(tmp_path / "runs/journal.jsonl") if line["kind"] == "ended")
    assert [body["reward"] for _, body in ended["feedback"]] == [one.value for one in said(explorer)]


def test_a_credit_function_that_raises_fails_its_attempt(explorer, tmp_path):
    tries = itertools.count()

    def credit(reward: float, ids: Any) -> Any:
        return no_credit(reward, ids) if next(tries) == 0 else [reward for _ in ids]

    report = learn(explorer, tmp_path, credit=credit, at_once=1)
    assert (report.stopped, report.rewarded, report.failures) == ("done", len(TASKS), {"ZeroDivisionError": 1})


def test_a_workflow_may_enter_its_run_whose_reward_follows_the_block(explorer, tmp_path):
    async def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        async with run:
            await say_async(model)
        return 1.0

    assert learn(explorer, tmp_path, workflow).rewarded == len(TASKS)


def exits(*_: Any) -> Any:
    raise SystemExit(2)  # as argparse does


async def exits_later(*_: Any) -> Any:
    raise SystemExit(2)


@pytest.mark.parametrize("fault", [exits, exits_later])
def test_a_workflow_that_exits_is_a_failed_attempt(explorer, tmp_path, fault):
    report = learn(explorer, tmp_path, fault, TASKS[:2], retries=0)
    assert (report.stopped, report.dropped, report.failures) == ("done", 2, {"RunError": 2})


async def endless(*_: Any) -> Any:
    await asyncio.Event().wait()


def hangs(*_: Any) -> Any:
    threading.Event().wait(300)


def no_credit(reward: float, ids: Any) -> Any:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"credit": no_credit}, "ZeroDivisionError"),
        ({"reward": cancelled}, "RunError"),
        ({"agent": cancelled}, "RunError"),
        ({"reward": exits}, "RunError"),
        ({"agent": exits_later}, "RunError"),
        ({"select": cancelled}, "select"),
        ({"select": endless, "timeout_s": 0.1}, "select"),
        ({"select": hangs, "timeout_s": 0.1, "at_once": 3}, "select"),
        ({"select": ~(flywheel.SamplingRate(0.0) | hangs), "timeout_s": 0.1, "at_once": 3}, "select"),
        ({"select": exits}, "select"),
    ],
)
def test_a_shadow_run_that_fails_in_an_unusual_way_leaves_its_worker_alive(explorer, options, cause):
    async def agent(request: Any, model: flywheel.Model | None) -> str:
        if model is not None:
            await say_async(model)
        return "reply"

    given = {"agent": agent, "reward": lambda run, reply: 1.0, "at_once": 1, "select": flywheel.SamplingRate(1.0)}
    runner = flywheel.TrainingRunner(explorer.url, **{**given, **options})
    serve = runner.watch(agent)
    with runner:
        for number in range(3):
            assert asyncio.run(serve(number)) == "reply"
        wait_until(lambda: runner.stats.failed[cause] == 3)


def test_the_first_failure_of_each_kind_is_reported_while_learn_continues(explorer, tmp_path, caplog):
    def fails(task: Any, model: flywheel.Model) -> float:
        if task["n"] == 0:
            raise ValueError(f"no action in {task}")
        say(model)
        return 1.0

    report = learn(explorer, tmp_path, fails, max_failed_share=1.0)
    assert report.failures == {"ValueError": 3}
    assert caplog.text.count("a run failed; the first ValueError: no action in {'n': 0}") == 1


def test_a_judge_that_hangs_leaves_its_runs_without_a_reward_and_learn_ends(explorer, tmp_path, monkeypatch):
    for module in ("episode", "evaluation"):
        limit_when(monkeypatch, module, lambda: False)  # only the judge's time is limited
    options = {"timeout_s": 0.5, "on_timeout": -1.0, "max_failed_share": 1.0}
    report = learn(explorer, tmp_path, tasks=TASKS[:2], eval_tasks=TASKS[:1], judge=endless, **options)
    assert (report.runs, report.rewarded, report.failures) == (2, 0, {"JudgeFailed": 2})
    assert report.evaluations[0].failed == 1


def test_what_a_run_that_timed_out_left_running_does_not_change_its_reward(explorer, tmp_path, monkeypatch):
    spoken, left = threading.Event(), threading.Event()
    limit_when(monkeypatch, "episode", spoken.is_set)

    async def late(model: flywheel.Model, run: flywheel.AsyncRun) -> None:
        async with run:
            await say_async(model)
            spoken.set()
            await asyncio.to_thread(wait_until, lambda: [row.reward for row in rows(explorer)] == [-1.0])
            run.reward(1.0)

    def workflow(task: Any, model: flywheel.Model, run: flywheel.AsyncRun) -> float:
        try:
            if task == TASKS[0]:
                asyncio.run(late(model, run))
            else:  # learn runs until the first workflow has ended
                left.wait(60)
        finally:
            left.set()
        return 1.0

    options = {"timeout_s": 0.5, "on_timeout": -1.0, "max_failed_share": 1.0, "retries": 0, "at_once": 2}
    learn(explorer, tmp_path, workflow, TASKS[:1], **options)
    assert left.wait(60)
    assert [row.reward for row in rows(explorer)] == [-1.0]
    assert len(said(explorer)) == 1
