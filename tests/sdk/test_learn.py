"""learn over the real explorer: what is sent, what is never sent, the pace, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from typing import Any

import flywheel
import pytest
from flywheel.journal import read_lines

from shared.ledger import transitions
from tests.sdk import hanging_program, learn_program
from tests.sdk.conftest import COLLECT, TASKS, announce_trainer, count, learn, rows, said, say, say_async
from tests.support.processes import REPOSITORY
from tests.support.servers import RunningExplorer, make_config, wait_until
from tests.support.time_limits import limit_when


def number(run_id: str) -> str:
    """Which of its task's runs it is."""
    return run_id.partition(".")[0]


def test_each_run_of_each_task_is_rewarded_and_its_group_committed(explorer, tmp_path):
    report = learn(explorer, tmp_path, runs_per_task=3, epochs=2, name="group")
    assert (report.runs, report.rewarded, report.dropped, report.stopped) == (36, 36, 0, "done")
    found = rows(explorer)
    assert {row.state for row in found} == {"READY"}
    assert Counter((row.task_id, row.reward) for row in found).most_common()[-1][1] == 3
    assert {number(row.run_id) for row in found} == {"0", "1", "2"}
    assert len({row.task_id for row in found}) == 12
    assert all(row.task_id.startswith("group/") for row in found)


def sync_workflow(task: Any, model: flywheel.Model) -> dict[str, float]:
    say(model)
    return {"reward": 0.5, "steps": 1}


def with_run(task: Any, run: flywheel.Run) -> flywheel.Result:
    reply = say(run.model)
    run.reward(0.25, of=reply.id)
    return flywheel.Result(response=reply.choices[0].message.content)


@pytest.mark.parametrize(
    ("workflow", "judge", "metrics"),
    [
        (sync_workflow, None, {"steps": 1.0}),
        (with_run, lambda task, reply: flywheel.Reward(0.5, {"right": float(bool(reply))}), {"right": 1.0}),
        (partial(sync_workflow), None, {"steps": 1.0}),
    ],
)
def test_a_workflow_may_be_sync_and_may_be_judged(explorer, tmp_path, workflow, judge, metrics):
    report = learn(explorer, tmp_path, workflow, TASKS[:2], judge=judge)
    assert (report.rewarded, report.reward_first) == (2, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "runs/episodes.jsonl").read_text().splitlines()]
    assert [line["metrics"] for line in lines] == [metrics] * 2
    assert "<svg" in (tmp_path / "runs/report.html").read_text()


def test_a_broken_attempt_is_tried_again_as_a_new_run_and_never_rewarded(explorer, tmp_path):
    report = learn(explorer, tmp_path, learn_program.workflow, TASKS, max_failed_share=1.0)
    assert (report.runs, report.rewarded, report.failures) == (6, 6, {"RuntimeError": 2})
    by_run = Counter((number(row.run_id), row.reward) for row in rows(explorer))
    assert {run for run, reward in by_run if reward is None} == {"0"}
    assert 99.0 not in {signal.value for signal in said(explorer)}
    assert by_run[("0", None)] == 4, "two broken attempts of two turns"


async def always_fails(task: Any, model: flywheel.Model) -> float:
    await say_async(model)
    raise ValueError("no luck")


def test_a_workflow_may_say_its_reward_itself_and_an_evaluation_uses_the_run_s_model(explorer, tmp_path):
    def says(task: Any, run: flywheel.Run) -> None:
        say(run.model)
        run.reward(0.75, metrics={"steps": 1})

    report = learn(explorer, tmp_path, says, TASKS, eval_tasks=TASKS, eval_runs=2)
    assert (report.rewarded, report.reward_last) == (6, 0.75)
    assert (report.evaluations[0].n, report.evaluations[0].metrics) == (12, {"steps": 1.0})
    assert [row.reward for row in rows(explorer)] == [0.75] * 6


async def two_players(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
    for name in ("a", "b"):
        player = run.child(name)
        await say_async(player.model)
        player.reward(1.0 if name == "a" else -1.0)
    return 0.25


def test_of_a_run_whose_chats_are_its_childrens_the_children_are_rewarded_and_the_report_has_the_run(
    explorer, tmp_path
):
    report = learn(explorer, tmp_path, two_players, runs_per_task=2, name="pairs")
    assert (report.runs, report.failures, report.reward_last) == (12, {}, 0.25)
    found = rows(explorer)
    assert Counter((number(row.run_id) + row.run_id[-2:], row.reward) for row in found) == {
        (f"{n}/{name}", reward): 6 for n in range(2) for name, reward in (("a", 1.0), ("b", -1.0))
    }
    assert {row.state for row in found} == {"READY"}
    lines = [line for line in read_lines(tmp_path / "runs" / "journal.jsonl") if line["kind"] == "ended"]
    assert {line["chats"] for line in lines} == {2}


def test_what_fails_to_the_last_retry_is_dropped_and_counted(explorer, tmp_path):
    report = learn(explorer, tmp_path, always_fails, TASKS, retries=1, max_failed_share=1.0)
    assert (report.runs, report.dropped, report.rewarded, report.failures) == (6, 6, 0, {"ValueError": 12})
    assert said(explorer) == []


def test_too_many_failures_stop_it_with_the_first_tracebacks(explorer, tmp_path):
    with pytest.raises(flywheel.TooManyFailures, match="no luck"):
        learn(explorer, tmp_path, always_fails, [{"n": n} for n in range(40)])
    assert json.loads((tmp_path / "runs/report.json").read_text())["stopped"] == "failed: TooManyFailures"


@pytest.mark.parametrize(("on_timeout", "rewards"), [(None, []), (-0.5, [-0.5] * 6)])
def test_a_timeout_is_dropped_or_scored_as_one_chooses(explorer, tmp_path, monkeypatch, on_timeout, rewards):
    hanging: list[Any] = []
    limit_when(monkeypatch, "episode", lambda: len(hanging) == len(TASKS))

    async def hang(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        hanging.append(task)
        await asyncio.Event().wait()
        return 1.0

    report = learn(explorer, tmp_path, hang, timeout_s=0.1, on_timeout=on_timeout)
    assert (report.runs, report.failures) == (6, {"TimedOut": 6})
    assert [row.reward for row in rows(explorer) if row.reward is not None] == rewards


@pytest.mark.parametrize("what", ["learn", "call", "conversation"])
def test_a_sync_function_that_hangs_does_not_keep_the_process_from_ending(explorer, tmp_path, what):
    program = [sys.executable, hanging_program.__file__, what, explorer.url, str(tmp_path / "runs")]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "agent_sdk")}
    ended = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=240, check=True)
    assert ended.stdout.strip() == str({"TimedOut": 1})


def test_a_workflow_that_never_asks_the_model_is_told_so(explorer, tmp_path):
    with pytest.raises(flywheel.TooManyFailures, match="recorded no chat"):
        learn(explorer, tmp_path, lambda task: 1.0, [{"n": n} for n in range(60)], retries=0)


@pytest.mark.parametrize(("result", "named"), [(float("nan"), "reward=nan"), ("good", "'good'"), (None, "judge=")])
def test_a_result_that_is_no_reward_is_named(explorer, tmp_path, result, named):
    async def wrong(task: Any, model: flywheel.Model) -> Any:
        await say_async(model)
        return result

    with pytest.raises(flywheel.ConfigError, match=named):
        learn(explorer, tmp_path, wrong)
    assert said(explorer) == []


def test_a_judge_that_fails_rewards_nothing(explorer, tmp_path):
    def judge(reply: Any) -> float:
        raise flywheel.JudgeFailed("no verdict")

    report = learn(explorer, tmp_path, judge=judge, max_failed_share=1.0)
    assert (report.runs, report.rewarded, report.failures) == (6, 0, {"JudgeFailed": 6})
    assert said(explorer) == []


def test_without_a_trainer_it_says_so(explorer, tmp_path):
    with pytest.raises(flywheel.NotTraining, match="flywheel trainer"):
        learn(explorer, tmp_path, require_trainer=True, patience_s=0.0)


def test_a_trainer_that_its_breaker_holds_trains_nothing(explorer, tmp_path):
    reason = "reward_drop=2.0 is above trainer.breaker.reward_drop=1.5 in update 7; look at the newest rewards"
    with explorer.ledger.write() as connection:
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        transitions.trip_breaker(connection, name="t", tripped={"figure": "reward_drop", "reason": reason})
    with pytest.raises(flywheel.NotTraining, match=f"{reason}.*--resume"):
        learn(explorer, tmp_path, require_trainer=True, patience_s=0.0)


def test_ctrl_c_ends_a_program_that_starts_nothing_because_training_is_behind(explorer, tmp_path):
    announce_trainer(explorer)
    folder = tmp_path / "learn"
    code = [sys.executable, str(REPOSITORY / "tests/sdk/paced_program.py"), explorer.url, str(folder)]
    with subprocess.Popen(code, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "agent_sdk")}) as process:
        wait_until(lambda: explorer.http.get("/status").json()["rows"]["READY"] > 8, 240)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    report = json.loads((folder / "report.json").read_text())
    assert report["stopped"] == "interrupted"
    assert report["runs"] == sum(explorer.http.get("/status").json()["rows"].values())


def test_ctrl_c_starts_nothing_new_and_commits_what_ended_of_a_group(explorer, tmp_path):
    presses = ["1"]

    async def interrupted(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        await say_async(model)
        if number(run.run_id) in presses:
            presses.remove(number(run.run_id))
            signal.raise_signal(signal.SIGINT)
        return 1.0

    report = learn(explorer, tmp_path, interrupted, at_once=1, runs_per_task=4)
    assert (report.runs, report.stopped) == (2, "interrupted")
    assert [row.state for row in rows(explorer)] == ["READY"] * 2
    assert learn(explorer, tmp_path, interrupted, runs_per_task=4).runs == 24
    assert [row.state for row in rows(explorer)] == ["READY"] * 24


class CutOff(flywheel.AsyncClient):
    """Its commits do not arrive."""

    async def commit(self, **_: Any) -> Any:
        raise flywheel.Unreachable("cut off")


async def test_a_group_whose_commit_did_not_arrive_is_committed_by_the_next_start(explorer, tmp_path):
    given = {**COLLECT, "folder": tmp_path / "runs"}
    async with CutOff(explorer.url) as client:
        with pytest.raises(flywheel.Unreachable, match="cut off"):
            await flywheel.alearn(count, TASKS[:1], client=client, **given)
    assert [(row.state, row.reward is None) for row in rows(explorer)] == [("RECORDED", False)]
    await flywheel.alearn(count, TASKS[:1], url=explorer.url, **given)
    assert [row.state for row in rows(explorer)] == ["READY"]


def test_a_line_of_progress_says_how_far_it_is_and_the_time_to_go(explorer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    async def waits(task: Any, model: flywheel.Model) -> float:
        await say_async(model)
        await asyncio.sleep(0.4)
        return 1.0

    learn(explorer, tmp_path, waits, at_once=1, progress=True)
    assert re.search(
        r"learn: \d/6 runs, \d\.\d/s, version .*, ready \d, failed 0, \d\.\d min to go", capsys.readouterr().err
    )


def test_learn_may_be_started_before_the_engine_is_in_service(scripted_engine, tmp_path):
    scripted_engine.script.healthy = False
    running = RunningExplorer(make_config(tmp_path, [scripted_engine.url], engine_wait_s=0.1))
    threading.Timer(3.0, setattr, (scripted_engine.script, "healthy", True)).start()
    try:
        report = learn(running, tmp_path, eval_tasks=TASKS[:1])
    finally:
        running.stop()
    assert (report.rewarded, report.failures, report.evaluations[0].failed) == (6, {}, 0)


def test_a_folder_of_other_work_is_refused_with_what_differs(explorer, tmp_path):
    learn(explorer, tmp_path)
    before = len(rows(explorer))
    for options in ({"seed": 1}, {"tasks": TASKS[:1]}, {"workflow": always_fails}, {"runs_per_task": 2}):
        with pytest.raises(flywheel.JournalMismatch, match="here"):
            learn(explorer, tmp_path, **options)
    with pytest.raises(flywheel.JournalMismatch, match="resume is false"):
        learn(explorer, tmp_path, resume=False)
    assert learn(explorer, tmp_path).runs == 6
    assert len(rows(explorer)) == before, "nothing was missing"


def test_tasks_that_cannot_be_read_are_named(explorer, tmp_path):
    broken = tmp_path / "tasks.jsonl"
    broken.write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(flywheel.ConfigError, match="line 2"):
        learn(explorer, tmp_path, tasks=broken)
    for tasks in ("none.txt", tmp_path / "none.jsonl", [], ["text"]):
        with pytest.raises(flywheel.ConfigError):
            learn(explorer, tmp_path, tasks=tasks)
