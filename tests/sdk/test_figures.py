"""The figures of reports and evaluations: rewards that the server weights, and runs that got none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flywheel
import pytest

from tests.sdk.conftest import TASKS, learn, rows, say
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config

weighted = flywheel.rewards.Weighted({"right": 2.0, "steps": -0.5}, rule="server")


@pytest.fixture
def weighting(scripted_engine: ScriptedEngine, tmp_path: Path) -> Iterator[RunningExplorer]:
    """An explorer that makes the reward of a run from its metrics."""
    config = make_config(tmp_path, [scripted_engine.url], reward={"metrics": {"right": 2.0, "steps": -0.5}})
    running = RunningExplorer(config).wait_ready()
    yield running
    running.stop()


def parts(task: Any, model: flywheel.Model) -> flywheel.Reward:
    say(model)
    return weighted({"right": float(task["n"]), "steps": 2.0})


@pytest.mark.parametrize("is_judged", [False, True])
def test_a_reward_that_the_server_weights_stands_in_the_report_and_in_evaluations(weighting, tmp_path, is_judged):
    def workflow(task: Any, model: flywheel.Model) -> flywheel.Result:
        return flywheel.Result(response=parts(task, model), metrics={"length": 3.0})

    given: dict[str, Any] = {"judge": lambda task, reply: reply} if is_judged else {}
    report = learn(weighting, tmp_path, workflow if is_judged else parts, TASKS[:2], eval_tasks=TASKS[1:2], **given)
    assert sorted(row.reward for row in rows(weighting)) == [-1.0, 1.0]
    assert (report.runs, report.rewarded, {report.reward_first, report.reward_last}) == (2, 2, {-1.0, 1.0})
    [found] = report.evaluations
    assert (found.n, found.mean, found.failures) == (1, 1.0, {})
    assert (found.metrics["right"], found.metrics["steps"]) == (1.0, 2.0)


def test_a_learn_that_rewarded_nothing_says_so(explorer, tmp_path, caplog):
    async def gone(task: Any, model: flywheel.Model) -> float:
        raise LookupError("no such model")

    report = learn(explorer, tmp_path, gone, TASKS[:2], retries=0)
    assert (report.stopped, report.rewarded) == ("done", 0)
    assert "none of the 2 runs was rewarded" in caplog.text and "LookupError" in caplog.text
    caplog.clear()
    learn(explorer, tmp_path, gone, TASKS[:2], retries=0, folder=tmp_path / "again")
    assert caplog.text.count("none of the 2 runs") == 1


@pytest.mark.parametrize("rewards", ["a number", "metrics"])
def test_a_learn_that_rewarded_something_says_nothing(explorer, tmp_path, caplog, rewards):
    def workflow(task: Any, model: flywheel.Model) -> Any:
        say(model)
        return 0.0 if rewards == "a number" else flywheel.Reward(None, {"steps": 1.0})

    learn(explorer, tmp_path, workflow, TASKS[:1])
    assert "was rewarded" not in caplog.text
