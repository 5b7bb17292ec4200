"""TrainingRunner: production is as it was, whatever happens beside it; what is chosen is replayed and rewarded."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flywheel
import pytest
from flywheel import selection

from tests.sdk.conftest import rows, said, say, say_async
from tests.support.servers import free_port, wait_until

PRODUCTION = flywheel.Model.of("http://127.0.0.1:1/v1", "strong", key="k")


async def agent(request: dict[str, Any], model: flywheel.Model) -> str:
    """Production answers without a model; the trainee asks it."""
    if model is PRODUCTION:
        request["seen"] = True  # production may change what it got
        return f"production: {request['text']}"
    assert "seen" not in request
    return str((await say_async(model, request["text"])).choices[0].message.content)


def score(run: flywheel.Run, reply: str) -> float:
    return 0.5


def ask(serve: Callable[..., Any], number: int = 1, **request: Any) -> list[str]:
    async def all_of_them() -> list[str]:
        return list(await asyncio.gather(*(serve({"text": f"t{n}", **request}) for n in range(number))))

    return asyncio.run(all_of_them())


def test_every_call_is_answered_by_production_and_the_chosen_ones_are_trained(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=flywheel.SamplingRate(1.0), repeat_time=2)
    serve = runner.watch(agent, production=PRODUCTION)
    with runner:
        assert ask(serve, 5) == [f"production: t{n}" for n in range(5)]
    stats = runner.stats
    assert (stats.seen, stats.selected, stats.runs, stats.rewarded, stats.committed) == (5, 5, 10, 10, 10)
    assert (stats.reward_mean, stats.dropped, dict(stats.failed)) == (0.5, 0, {})
    assert {row.state for row in rows(explorer)} == {"READY"}
    assert len({row.task_id for row in rows(explorer)}) == 5
    assert {row.run_id for row in rows(explorer)} == {"0", "1"}
    assert ask(serve) == ["production: t0"], "it serves when it is stopped, too"
    assert not runner.running


def test_the_trainee_asks_for_the_model_by_the_name_that_was_given(explorer):
    names = []
    runner = flywheel.TrainingRunner(
        explorer.url, lambda _, model: names.append(model.name), score, model="desk", select=flywheel.SamplingRate(1.0)
    )
    with runner:
        runner.watch(lambda *_: "production", production=PRODUCTION)({})
    assert names == ["desk"]


def test_a_sync_agent_is_watched_as_one(explorer):
    def sync_agent(request: str, model: flywheel.Model | None) -> str:
        return "production" if model is None else str(say(model).choices[0].message.content)

    runner = flywheel.TrainingRunner(
        explorer.url, reward=lambda run, reply: len(reply), select=flywheel.SamplingRate(1.0)
    )
    serve = runner.watch(sync_agent)
    with runner:
        assert serve("hello") == "production"
    assert runner.stats.rewarded == 1


async def broken(request: Any, model: flywheel.Model) -> str:
    raise KeyError("an error of production's own")


def test_what_production_raises_is_raised_and_nothing_is_replayed(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=flywheel.SamplingRate(1.0))
    with runner, pytest.raises(KeyError, match="production's own"):
        ask(runner.watch(broken, production=PRODUCTION))
    assert runner.stats.runs == 0


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copy")


def fails(*_: Any) -> Any:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("options", "request_", "cause"),
    [
        ({"reward": fails}, {}, "RuntimeError"),
        ({"reward": lambda run, reply: float("nan")}, {}, "ConfigError"),
        ({"agent": fails}, {}, "RuntimeError"),
        ({"agent": lambda request, model: "no chat"}, {}, "NothingRecorded"),
        ({"select": fails}, {}, "select"),
        ({"select": flywheel.SamplingRate(1.0, by=fails)}, {}, "watch"),
        ({}, {"object": Uncopyable()}, "watch"),
    ],
)
def test_whatever_fails_beside_it_production_answers_and_the_cause_is_counted(explorer, options, request_, cause):
    seen: list[BaseException] = []
    given = {"agent": agent, "reward": score, "select": flywheel.SamplingRate(1.0), "on_error": seen.append, **options}
    runner = flywheel.TrainingRunner(explorer.url, **given)
    serve = runner.watch(agent, production=PRODUCTION)
    with runner:
        assert ask(serve, 3, **request_) == ["production: t0", "production: t1", "production: t2"]
    assert runner.stats.failed[cause] == 3, runner.stats
    assert runner.stats.last_error
    assert said(explorer) == []


def test_without_an_explorer_production_goes_on_and_failed_commits_are_counted():
    runner = flywheel.TrainingRunner(
        f"http://127.0.0.1:{free_port()}", agent, score, select=flywheel.SamplingRate(1.0), commit_every_s=0.01
    )
    runner.start()
    serve = runner.watch(agent, production=PRODUCTION)
    assert ask(serve, 20) == [f"production: t{n}" for n in range(20)]
    wait_until(lambda: runner.stats.failed["APIConnectionError"] > 0, 60)
    stopping = threading.Thread(target=runner.stop, args=(0.0,))
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive(), "the last commit is given up"
    assert runner.stats.failed["commit"] > 0
    assert runner.stats.rewarded == 0


def test_a_full_queue_drops_and_counts(explorer):
    gate = threading.Event()

    def waits(request: Any, model: flywheel.Model) -> str:
        gate.wait(60)
        return str(say(model))

    runner = flywheel.TrainingRunner(
        explorer.url, waits, score, select=flywheel.SamplingRate(1.0), at_once=1, queue=2, timeout_s=30
    )
    with runner:
        ask(runner.watch(agent, production=PRODUCTION), 10)
        gate.set()
    stats = runner.stats
    assert stats.dropped >= 7
    assert stats.dropped + stats.rewarded == 10


def test_a_shadow_run_that_serves_is_not_shadowed_again(explorer):
    runner = flywheel.TrainingRunner(explorer.url, reward=score, select=flywheel.SamplingRate(1.0))

    async def inner(request: Any, model: flywheel.Model | None) -> str:
        return "" if model is None else str(await say_async(model))

    async def outer(request: Any, model: flywheel.Model | None) -> str:
        await runner.watch(inner)(request)
        return await inner(request, model)

    with runner:
        ask(runner.watch(outer))
    assert runner.stats.seen == 2, "production's own two calls"
    assert runner.stats.rewarded == 2


def test_marked_calls_are_replayed_under_their_task(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=flywheel.Marked(ttl_s=60))
    serve = runner.watch(agent, production=PRODUCTION)
    with runner:
        ask(serve, 3)
        with flywheel.marked("refund", task_id="t-1"):
            ask(serve, 2)
    assert (runner.stats.seen, runner.stats.rewarded) == (5, 2)
    assert {row.task_id for row in rows(explorer)} == {"t-1"}
    assert len({row.run_id for row in rows(explorer)}) == 2


def test_a_mark_holds_from_a_plain_call_on_and_expires(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=flywheel.Marked(ttl_s=60))
    serve = runner.watch(agent, production=PRODUCTION)

    async def marks() -> None:
        flywheel.mark("refund", task_id="t-2", channel="mail")
        await serve({"text": "while it holds"})
        selection._mark.set(replace(selection.current_mark(), at_s=time.monotonic() - 61))
        await serve({"text": "when it has expired"})

    with runner:
        asyncio.run(marks())
    assert (runner.stats.seen, runner.stats.rewarded) == (2, 1)
    assert [row.task_id for row in rows(explorer)] == ["t-2"]


def test_a_function_may_select_by_the_reply(explorer):
    async def chosen(call: flywheel.Call) -> bool:
        return call.reply.endswith("t1") and not call.request.get("seen")

    runner = flywheel.TrainingRunner(explorer.url, agent, score, select=chosen)
    with runner:
        ask(runner.watch(agent, production=PRODUCTION), 3)
    assert (runner.stats.selected, runner.stats.rewarded) == (1, 1)


def test_no_reward_now_leaves_the_rows_for_people(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, lambda run: None, select=flywheel.SamplingRate(1.0))
    with runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert runner.stats.unrewarded == 1
    assert [row.state for row in rows(explorer)] == ["RECORDED"]


def test_strategies_combine():
    yes, no = flywheel.SamplingRate(1.0), flywheel.SamplingRate(0.0)
    call = flywheel.Call("hello")
    assert (yes | no).pick(call) and not (yes & no).pick(call) and (~no).pick(call)
    assert not (yes | (lambda call: True)).early
    assert asyncio.run((no | (lambda call: True)).decide(call)).reason
    assert asyncio.run((yes & (lambda call: None)).decide(call)) is None


def test_a_share_by_user_keeps_or_leaves_a_user_whole():
    rate = flywheel.SamplingRate(0.3, by=lambda call: call.request)
    chosen = [bool(rate.pick(flywheel.Call(user % 500))) for user in range(1000)]
    assert chosen[:500] == chosen[500:]
    assert 100 < sum(chosen[:500]) < 200


def test_a_reward_function_of_wrong_arguments_is_refused_at_the_start(explorer):
    runner = flywheel.TrainingRunner(explorer.url, agent, lambda a, b, c, d: 1.0)
    with pytest.raises(flywheel.ConfigError, match="run, reply"):
        runner.start()
    assert not runner.running


@pytest.mark.parametrize("wrong", [{"repeat_time": 0}, {"at_once": 0}, {"queue": 0}, {"reward": None}])
def test_a_wrong_option_is_named(wrong):
    with pytest.raises(flywheel.ConfigError, match=next(iter(wrong))):
        flywheel.TrainingRunner("http://127.0.0.1:1", agent, **{"reward": score, **wrong})


def test_stop_does_not_wait_for_an_agent_that_ignores_its_end(explorer, monkeypatch):
    monkeypatch.setattr("flywheel.shadow.LAST_S", 0.5)
    begun, release = threading.Event(), threading.Event()

    async def stubborn(request: dict[str, Any], model: flywheel.Model | None) -> str:
        if model is PRODUCTION:
            return "production"
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return "late"

    def blocking(request: dict[str, Any], model: flywheel.Model | None) -> str:
        if model is PRODUCTION:
            return "production"
        begun.set()
        release.wait(300)
        return "late"

    for agent_of, asks in ((stubborn, True), (blocking, False)):
        begun.clear()
        runner = flywheel.TrainingRunner(
            explorer.url, agent_of, score, select=flywheel.SamplingRate(1.0), repeat_time=3
        )
        serve = runner.watch(agent_of, production=PRODUCTION)
        runner.start()
        if asks:
            ask(serve)
        else:
            serve({"text": "t"})
        assert begun.wait(60)
        ended = threading.Thread(target=runner.stop, args=(0.2,), daemon=True)
        ended.start()
        ended.join(60)
        assert not ended.is_alive(), "production's end waits for a shadow run"
        assert runner.stats.rewarded == 0
    release.set()
