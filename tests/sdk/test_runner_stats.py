"""What TrainingRunner's stats say: each run once, by what became of it, and the runner's own rows."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import flywheel
import pytest

from tests.sdk.conftest import rows, say, say_async
from tests.sdk.test_runner import PRODUCTION, agent, ask, fails, score
from tests.support.servers import free_port, wait_until
from tests.support.time_limits import limit_when

EVERY = flywheel.SamplingRate(1.0)
NO_RUNS = {"watch", "select", "commit"}  # of failed


def counted(stats: flywheel.Stats) -> int:
    """Runs by what became of them."""
    of_runs = sum(number for cause, number in stats.failed.items() if cause not in NO_RUNS)
    return stats.rewarded + stats.unrewarded + stats.unsafe + of_runs


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"agent": fails},
        {"agent": lambda request, model: "no chat"},
        {"reward": fails},
        {"reward": lambda run: None},
        {"credit": fails},
        {"reward": lambda run, reply: float("nan")},
    ],
)
def test_each_run_is_counted_once_by_its_outcome(explorer, given):
    runner = flywheel.TrainingRunner(explorer.url, **{"agent": agent, "reward": score, "select": EVERY, **given})
    with runner:
        ask(runner.watch(agent, production=PRODUCTION), 3)
    assert (runner.stats.runs, counted(runner.stats)) == (3, 3), runner.stats


def test_a_run_that_stop_interrupts_is_counted_as_such_and_unstarted_ones_as_dropped(explorer, monkeypatch):
    monkeypatch.setattr("flywheel.shadow.LAST_S", 60.0)  # the last commit may take a while
    begun: list[Any] = []

    async def endless(request: dict[str, Any], model: flywheel.Model) -> str:
        begun.append(request)
        await asyncio.Event().wait()
        return ""

    runner = flywheel.TrainingRunner(explorer.url, endless, score, select=EVERY, at_once=2, repeat_time=2)
    runner.start()
    ask(runner.watch(agent, production=PRODUCTION), 5)
    wait_until(lambda: len(begun) == 2)
    runner.stop(0.1)
    stats = runner.stats
    assert (stats.runs, dict(stats.failed), stats.dropped) == (2, {"stopped": 2}, 3)
    assert stats.last_error == "TimedOut: stop waited no longer than drain_s=0.1 for it"


def test_an_error_without_a_message_is_reported_by_its_type(explorer):
    async def silent(request: dict[str, Any], model: flywheel.Model) -> str:
        raise TimeoutError

    with flywheel.TrainingRunner(explorer.url, silent, score, select=EVERY) as runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert runner.stats.last_error == "TimeoutError"


def test_an_unanswered_last_commit_is_reported_as_such(monkeypatch):
    monkeypatch.setattr("flywheel.shadow.LAST_S", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    runner = flywheel.TrainingRunner(url, agent, score)
    runner.start()
    runner.stop(0.0)
    assert runner.stats.failed == {"commit": 1}
    assert str(runner.stats.last_error).startswith("Unreachable: POST /commit: no answer within ")
    assert url in str(runner.stats.last_error)


def test_what_others_have_made_ready_is_not_counted_as_committed(explorer):
    with flywheel.Client(explorer.url) as other:
        for _ in range(4):
            with other.run() as run, run.model.openai() as openai:
                openai.chat.completions.create(model="agent", messages=[{"role": "user", "content": "other"}])
                run.reward(1.0)

    async def talks(request: dict[str, Any], model: flywheel.Model) -> str:
        for turn in range(2):
            await say_async(model, f"{request['text']}, turn {turn}")
        return ""

    def every_other(run: flywheel.Run, reply: str) -> float | None:
        rated.append(run)
        return None if len(rated) % 2 else 0.5

    rated: list[flywheel.Run] = []
    with flywheel.TrainingRunner(explorer.url, talks, every_other, select=EVERY) as runner:
        ask(runner.watch(agent, production=PRODUCTION), 4)
    stats = runner.stats
    assert (stats.rewarded, stats.unrewarded, stats.commits) == (2, 2, 1)
    assert sum(row.state == "READY" for row in rows(explorer)) == 4 + 2 * 2
    assert stats.committed == 2 * 2, "replies of two runs of two turns"


def test_what_a_failed_commit_left_is_counted_with_the_next(explorer, monkeypatch):
    refuses = [True]
    commit = flywheel.AsyncClient.commit

    async def refused_once(client: flywheel.AsyncClient, **scope: Any) -> flywheel.Committed:
        if refuses:
            raise flywheel.Refused(refuses.pop() and 503, "on purpose")
        return await commit(client, **scope)

    monkeypatch.setattr(flywheel.AsyncClient, "commit", refused_once)
    with flywheel.TrainingRunner(explorer.url, agent, score, select=EVERY) as runner:
        ask(runner.watch(agent, production=PRODUCTION), 2)
        wait_until(lambda: runner.stats.rewarded == 2)
        runner.commit()
        assert (runner.stats.commits, runner.stats.committed) == (0, 0)
        runner.commit()
        assert (runner.stats.commits, runner.stats.committed) == (1, 2)
    assert runner.stats.committed == 2


def test_an_async_reward_function_may_commit(explorer):
    async def commits(run: flywheel.Run, reply: str) -> float:
        runner.commit()
        return 1.0

    runner = flywheel.TrainingRunner(explorer.url, agent, commits, select=EVERY, commit_every_s=600.0)
    with runner:
        serve = runner.watch(agent, production=PRODUCTION)
        for number in (1, 2):
            ask(serve)
            wait_until(lambda number=number: (runner.stats.rewarded, runner.stats.commits) == (number, number))
    assert runner.stats.failed == {}


@pytest.mark.parametrize(("said", "runs"), [(re.search("hello", "hello"), 3), ("", 0), (0, 0)])
def test_a_selection_may_return_any_truth_value(explorer, said, runs):
    runner = flywheel.TrainingRunner(explorer.url, reward=lambda run, reply: 1.0, select=lambda call: said, at_once=1)
    serve = runner.watch(lambda request, model: model and say(model).id)
    with runner:
        for number in range(3):
            serve(number)
    assert (runner.stats.selected, runner.stats.rewarded, runner.stats.dropped) == (runs, runs, 0)


def test_an_unknown_credit_is_refused_before_anything_is_replayed():
    with pytest.raises(flywheel.ConfigError, match="credit='both'"):
        flywheel.TrainingRunner("http://127.0.0.1:1", reward=lambda run, reply: 1.0, credit="both")


def test_a_run_that_takes_too_long_is_counted_and_not_rewarded(explorer, monkeypatch):
    hanging: list[Any] = []
    limit_when(monkeypatch, "shadow", lambda: hanging)

    async def slow(request: Any, model: flywheel.Model) -> str:
        await say_async(model)
        hanging.append(request)
        await asyncio.Event().wait()
        return ""

    runner = flywheel.TrainingRunner(explorer.url, slow, score, select=EVERY, timeout_s=0.1)
    with runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert runner.stats.failed["TimedOut"] == 1
    assert [row.reward for row in rows(explorer)] == [None]


def test_a_reward_function_that_hangs_occupies_no_worker_for_ever(explorer, monkeypatch):
    hanging: list[Any] = []
    limit_when(monkeypatch, "shadow", lambda: hanging and not runner.stats.runs)

    async def hangs_at_first(run: flywheel.Run, reply: Any) -> float:
        if reply == "first":
            hanging.append(run)
            await asyncio.Event().wait()
        return 1.0

    def replying(request: dict[str, Any], model: flywheel.Model) -> Any:
        say(model)
        return request["text"]

    options: dict[str, Any] = {"reward": hangs_at_first, "select": EVERY, "at_once": 1, "timeout_s": 0.1}
    with flywheel.TrainingRunner(explorer.url, replying, **options) as runner:
        serve = runner.watch(lambda request, model: "", production=PRODUCTION)
        serve({"text": "first"}), serve({"text": "second"})
        wait_until(lambda: runner.stats.runs == 2)
    assert (dict(runner.stats.failed), runner.stats.rewarded) == ({"TimedOut": 1}, 1)


def test_a_reward_that_the_server_makes_from_metrics_counts_as_one(explorer):
    rule = flywheel.rewards.Weighted({"a": 1.0}, rule="server")
    runner = flywheel.TrainingRunner(explorer.url, agent, lambda run, reply: rule({"a": 2.0}), select=EVERY)
    with runner:
        ask(runner.watch(agent, production=PRODUCTION), 3)
    assert (runner.stats.rewarded, runner.stats.unrewarded, runner.stats.reward_mean) == (3, 0, 2.0), runner.stats


def test_calls_that_a_late_strategy_could_not_decide_on_are_counted_apart(explorer):
    gate = threading.Event()

    def late(call: flywheel.Call) -> bool:
        gate.wait(60)
        return False

    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=late, at_once=1, queue=2, timeout_s=60)
    with runner:
        ask(runner.watch(agent, production=PRODUCTION), 10)
        assert (runner.stats.dropped, runner.stats.selected) == (0, 0), runner.stats
        assert runner.stats.undecided >= 7
        gate.set()
    assert (runner.stats.dropped, runner.stats.runs) == (0, 0)


def test_calls_that_are_undecided_when_stop_no_longer_waits_are_not_dropped(explorer):
    begun = threading.Event()

    async def hangs(call: flywheel.Call) -> bool:
        begun.set()
        await asyncio.Event().wait()
        return True

    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=hangs, at_once=1)
    runner.start()
    ask(runner.watch(agent, production=PRODUCTION), 3)
    assert begun.wait(60)
    runner.stop(0.1)
    assert (runner.stats.selected, runner.stats.dropped, runner.stats.undecided) == (0, 0, 3), runner.stats
