"""learn over the real explorer: how it ends, and what a second one in another folder finds."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flywheel
import pytest
from flywheel import schedule

from tests.sdk.conftest import COLLECT, TASKS, count, learn, publishing, rows, say_async, serve
from tests.support.time_limits import end_when


async def breaks(task: Any, model: flywheel.Model) -> float:
    await say_async(model)
    raise ValueError("a fault of the agent")


def test_the_runs_of_another_folder_are_other_runs_though_name_and_tasks_are_the_same(explorer, tmp_path):
    learn(explorer, tmp_path, breaks, retries=0, max_failed_share=1.0)
    learn(explorer, tmp_path, count, folder=tmp_path / "another")
    found = Counter((row.state, row.reward is None) for row in rows(explorer))
    assert found == {("RECORDED", True): 6, ("READY", False): 6}, "what broke is never rewarded"


async def one_is_silent(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
    for name, reward in (("a", 1.0), ("silent", -1.0), ("c", 0.5)):
        player = run.child(name)
        if name != "silent":
            await say_async(player.model)
        player.reward(reward)
    return 0.25


def test_a_child_that_never_spoke_costs_the_others_nothing(explorer, tmp_path, caplog):
    report = learn(explorer, tmp_path, one_is_silent)
    assert (report.runs, report.rewarded, report.failures) == (6, 6, {})
    assert Counter(row.reward for row in rows(explorer)) == {1.0: 6, 0.5: 6}
    assert any("/silent" in message and "no chat" in message for message in caplog.messages)


def test_a_run_left_by_hand_logs_a_child_without_chats(client, explorer, caplog):
    with client.run("t") as run:
        for name in ("silent", "b"):
            run.child(name).reward(1.0)
        with run.child("b").model.openai(max_retries=0) as openai:
            openai.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
    assert [row.reward for row in rows(explorer)] == [1.0]
    assert any("/silent" in message for message in caplog.messages)


@pytest.mark.parametrize("end", ["the time is up", "Ctrl-C"])
def test_what_runs_when_the_work_is_ended_is_finished_and_rewarded(explorer, tmp_path, monkeypatch, end):
    monkeypatch.setattr(schedule, "_BREAK_OFF_S", 0.1)
    running: list[Any] = []
    end_when(monkeypatch, lambda: bool(running))

    async def slow(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        running.append(task)
        if end == "Ctrl-C" and task["n"] == TASKS[0]["n"]:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.6)
        return 1.0

    seconds = 0.2 if end == "the time is up" else None
    report = learn(explorer, tmp_path, slow, TASKS, seconds=seconds)
    assert report.stopped == ("time" if seconds else "interrupted")
    assert report.rewarded == len(rows(explorer)) > 0
    assert {row.state for row in rows(explorer)} == {"READY"}


@pytest.mark.parametrize("epochs", [1, 1000])
def test_after_so_many_newer_versions_it_starts_nothing_more(explorer, tmp_path, epochs):
    serve(explorer, 3)
    workflow = publishing(explorer, 4, 5, 6)
    report = learn(explorer, tmp_path, workflow, TASKS, epochs=epochs, versions=2, at_once=1, eval_tasks=TASKS[:1])
    assert (report.stopped, report.version_first, report.version_last) == ("versions", 3, 5)
    assert report.runs == report.rewarded == 2
    assert [evaluation.version for evaluation in report.evaluations] == [3, 5]


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["", "ignored"])
def test_after_a_second_ctrl_c_what_runs_has_at_most_a_moment_to_end(explorer, tmp_path, before):
    async def slow(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
        return 1.0

    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        learn(explorer, tmp_path, slow, TASKS[:1])
    if before is not signal.SIG_IGN:  # else it interrupts at once
        assert [(row.state, row.reward) for row in rows(explorer)] == [("READY", 1.0)]
    assert json.loads((tmp_path / "runs/report.json").read_text())["stopped"] == "interrupted"


def test_after_a_second_ctrl_c_what_does_not_end_in_a_moment_is_cancelled(explorer, tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "_BREAK_OFF_S", 0.1)

    async def endless(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        learn(explorer, tmp_path, endless, TASKS[:1])
    assert [(row.state, row.reward) for row in rows(explorer)] == [("RECORDED", None)]


@pytest.mark.parametrize("ended", ["neither", "the second"])
async def test_ctrl_c_stops_every_learn_of_a_program_that_has_not_ended(explorer, tmp_path, ended):
    reached = [asyncio.Event(), asyncio.Event()]

    async def one(number: int, tasks: Any) -> flywheel.Report:
        async def workflow(task: Any, model: flywheel.Model) -> float:
            await say_async(model)
            reached[number].set()
            return 1.0

        given = {"folder": tmp_path / str(number), "name": str(number), "at_once": 1, **COLLECT}
        return await flywheel.alearn(workflow, tasks, url=explorer.url, **given)

    many = [{"n": n} for n in range(300)]
    first = asyncio.create_task(one(0, many))
    second = asyncio.create_task(one(1, many if ended == "neither" else many[:1]))
    await asyncio.gather(*(event.wait() for event in reached))
    if ended == "the second":
        await second
    signal.raise_signal(signal.SIGINT)
    assert (await first).stopped == "interrupted"
    assert (await second).stopped == ("interrupted" if ended == "neither" else "done")


def test_ctrl_c_stops_a_learn_in_another_thread_too(explorer, tmp_path):
    is_reached = threading.Event()

    async def aside(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        is_reached.set()
        return 1.0

    async def pressing(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        await asyncio.to_thread(is_reached.wait, 60)
        signal.raise_signal(signal.SIGINT)
        return 1.0

    many = [{"n": n} for n in range(300)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(learn, explorer, tmp_path, aside, many, folder=tmp_path / "aside", name="aside", at_once=1)
        assert learn(explorer, tmp_path, pressing, many, at_once=1).stopped == "interrupted"
    assert other.result().stopped == "interrupted"


def test_a_learn_in_another_thread_leaves_the_program_s_handler_in_place(explorer, tmp_path):
    found: list[Any] = []

    async def looks(task: Any, model: flywheel.Model) -> float:
        found.append(signal.getsignal(signal.SIGINT))
        return await count(task, model)

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(learn, explorer, tmp_path, looks, TASKS[:1]).result().stopped == "done"
    assert [*found, signal.getsignal(signal.SIGINT)] == [before, before]


class Away(flywheel.AsyncClient):
    """Nobody hears how the explorer is."""

    async def status(self) -> Any:
        raise flywheel.Unreachable("cut off")


async def test_the_report_names_the_reason_for_the_end(explorer, tmp_path):
    async with Away(explorer.url) as client:
        with pytest.raises(flywheel.Unreachable):
            await flywheel.alearn(count, TASKS, client=client, folder=tmp_path, **COLLECT)
    assert json.loads((tmp_path / "report.json").read_text())["stopped"] == "failed: Unreachable"


def test_a_reward_that_the_explorer_refused_is_no_obstacle_to_a_later_start(explorer, tmp_path):
    truth = {"reward": 1000.0}  # outside reward.accept

    async def workflow(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        return truth["reward"]

    with pytest.raises(flywheel.Refused, match="reward"):
        learn(explorer, tmp_path, workflow, TASKS[:2], eval_tasks=None)
    truth["reward"] = 0.5
    report = learn(explorer, tmp_path, workflow, TASKS[:2], eval_tasks=TASKS[:1])
    assert (report.stopped, report.rewarded) == ("done", 2)
    assert sorted(row.reward for row in rows(explorer) if row.reward is not None) == [0.5, 0.5]


def test_the_end_of_the_time_after_ctrl_c_changes_nothing(explorer, tmp_path, monkeypatch):
    pressed: list[Any] = []
    end_when(monkeypatch, lambda: bool(pressed))

    async def slow(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        await say_async(model)
        if run.run_id != "eval":
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
            pressed.append(task)
            await asyncio.sleep(0.5)
        return 1.0

    assert learn(explorer, tmp_path, slow, TASKS[:1], seconds=0.2).stopped == "interrupted"


def test_ctrl_c_in_an_evaluation_starts_none_of_its_further_runs(explorer, tmp_path):
    begun = []

    async def interrupted(task: Any, model: flywheel.Model) -> float:
        begun.append(task)
        await say_async(model)
        if len(begun) == 1:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    report = learn(explorer, tmp_path, interrupted, TASKS, eval_tasks=TASKS, at_once=1)
    assert (len(begun), report.evaluations, report.stopped) == (1, [], "interrupted")


def test_a_run_that_timed_out_before_its_first_chat_is_dropped_and_counted_once(explorer, tmp_path):
    options = {"timeout_s": 0.2, "on_timeout": -1.0, "max_failed_share": 1.0}
    report = learn(explorer, tmp_path, lambda task: asyncio.sleep(60), TASKS[:2], **options)
    assert (report.runs, report.dropped, report.failures) == (2, 2, {"TimedOut": 2})


def test_a_report_counts_the_failed_attempts_of_all_starts(explorer, tmp_path):
    async def fails(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        if task["n"] < 2:
            raise ValueError("no luck")
        return 1.0

    given: dict[str, Any] = {"retries": 1, "max_failed_share": 1.0}
    first = learn(explorer, tmp_path, fails, **given)
    assert (first.rewarded, first.dropped, first.failures) == (4, 2, {"ValueError": 4})
    again = learn(explorer, tmp_path, fails, **given)
    assert (again.rewarded, again.dropped, again.failures) == (4, 2, {"ValueError": 4})
    assert json.loads((tmp_path / "runs/report.json").read_text())["failures"] == {"ValueError": 4}


async def test_a_learn_that_is_cancelled_twice_leaves_no_run_behind(explorer, tmp_path):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(task: Any, model: flywheel.Model) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    learning = asyncio.create_task(
        flywheel.alearn(endless, TASKS[:1], url=explorer.url, folder=tmp_path / "runs", **COLLECT)
    )
    await begun.wait()
    for _ in range(2):
        learning.cancel()
        await asyncio.wait({learning}, timeout=0.1)
    with pytest.raises(asyncio.CancelledError):
        await learning
    assert ended.is_set()
