"""What all examples do, over the real explorer and a scripted engine: evaluate, learn, evaluate, report."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import flywheel
import pytest

from examples.run import SERVED, Example, Shuffled, of_version_in_service, parser, run
from examples.serving import MARKER
from tests.sdk.conftest import rows, say_async
from tests.support.servers import RunningExplorer, make_config
from tests.support.time_limits import end_when


async def agent(task: Any, model: flywheel.Model) -> int:
    await say_async(model, f"task {task['n']}")
    return int(task["n"])


def reward(reply: int) -> flywheel.Reward:
    return flywheel.Reward(float(reply), {"number": float(reply)})


def example(**options: Any) -> Example:
    tasks = [{"n": n} for n in range(4)]
    learn = {"require_trainer": False, "progress": False, "at_once": 4, "max_ready_rows": 10**6}
    given: dict[str, Any] = {"tasks": tasks, "held_out": tasks[:2], "recipe": None, "engine": {}, "trainer": {}}
    given |= {"served": learn, **options}
    return Example(name="sums", about="sums", workflow=agent, judge=reward, **given)


@pytest.fixture
def time_for_runs(explorer, monkeypatch) -> None:
    """An example learns until some runs have been recorded, and for as long as it is told."""
    end_when(monkeypatch, lambda: len(rows(explorer)) > 4)


def play(explorer, tmp_path, *options: str) -> int:
    arguments = ["--url", explorer.url, "--minutes", "0.02", "--root", str(tmp_path / "root"), *options]
    return run(example(), parser("sums", "sums").parse_args(arguments))


@pytest.mark.usefixtures("time_for_runs")
def test_an_example_ends_with_a_line_of_json_and_a_report(explorer, tmp_path, capsys):
    assert play(explorer, tmp_path) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["before"] == found["after"]
    assert (found["before"]["n"], found["before"]["reward"], found["before"]["number"]) == (2, 0.5, 0.5)
    assert found["runs"] == len(rows(explorer)) > 4, "evaluations are not recorded"
    report = json.loads((tmp_path / "root/report.json").read_text())
    assert (report["stopped"], len(report["evaluations"])) == ("time", 2)
    assert "<svg" in (tmp_path / "root/report.html").read_text()
    assert play(explorer, tmp_path, "--held-out", "1") == 0, "the same folder is made anew"


def test_an_example_waits_for_a_server_whose_engine_still_starts(scripted_engine, tmp_path, capsys, monkeypatch):
    wait_ready = flywheel.Client.wait_ready

    def start_engine(client: flywheel.Client, timeout_s: float) -> None:
        scripted_engine.script.healthy = True
        wait_ready(client, timeout_s)

    monkeypatch.setattr(flywheel.Client, "wait_ready", start_engine)
    scripted_engine.script.healthy = False
    starting = RunningExplorer(make_config(tmp_path, [scripted_engine.url], engine_wait_s=0.1))
    try:
        assert play(starting, tmp_path) == 0
    finally:
        starting.stop()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["before"]["n"], found["before"]["failed"]) == (2, 0)


def test_an_example_without_a_reward_before_learning_does_not_learn(explorer, scripted_engine, tmp_path, capsys):
    scripted_engine.script.refused.add("/v1/chat/completions")
    assert play(explorer, tmp_path) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sums: before learning, none of 2 runs gave a reward: InternalServerError"), last


@pytest.mark.parametrize("count", ["0", "-1", "few"])
def test_a_number_of_held_out_tasks_is_1_or_more(count, capsys):
    with pytest.raises(SystemExit):
        parser("sums", "sums").parse_args([f"--held-out={count}"])
    assert capsys.readouterr().err.endswith("argument --held-out: give a whole number of 1 or more\n")


@pytest.mark.usefixtures("time_for_runs")
def test_a_model_of_a_server_learns_with_options_of_its_own(explorer, tmp_path):
    served = {**example().served, "runs_per_task": 2}
    arguments = ["--url", explorer.url, "--minutes", "0.02", "--root", str(tmp_path / "root")]
    assert run(example(served=served, learn={"runs_per_task": 5}), parser("sums", "sums").parse_args(arguments)) == 0
    runs = [json.loads(line)["place"] for line in (tmp_path / "root/episodes.jsonl").read_text().splitlines()]
    assert {run.rpartition("#")[2] for run in runs} == {"0", "1"}
    assert SERVED["runs_per_task"] > 1, "GRPO compares runs of a task"


def test_an_example_with_a_server_s_address_reaches_loopback_also_where_the_environment_names_a_proxy(
    explorer, tmp_path, monkeypatch
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("examples.run.RETRY_S", 0.1)
    assert play(explorer, tmp_path) == 0
    assert "no_proxy" not in os.environ


def test_a_folder_of_something_else_is_left_alone(explorer, tmp_path, capsys):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/thesis").touch()
    assert play(explorer, tmp_path) == 1
    assert "holds something that is no example" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "root").iterdir()] == ["thesis"]


def test_an_example_reports_an_error_in_one_line(tmp_path, capsys):
    arguments = ["--url", "http://127.0.0.1:9", "--root", str(tmp_path / "root"), "--minutes", "0.01"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.run.RETRY_S", 0.1)
        assert run(example(), parser("sums", "sums").parse_args(arguments)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("sums: ")
    assert (tmp_path / "root" / MARKER).exists()


async def test_a_shuffled_run_gets_a_reward_of_another_task(tmp_path):
    judge = Shuffled(example(), seed=1)
    assert await judge({"n": 1}, 1, None) is None, "nothing is known of another task yet"
    assert await judge({"n": 1}, 1, None) is None
    assert await judge({"n": 2}, 2, None) == 1.0
    given = [await judge({"n": 2}, 2, None) for _ in range(20)]
    assert given == [1.0] * 20
    assert {await judge({"n": n}, n, None) for n in range(3, 30)} - {1.0, 2.0}


async def test_shuffled_rewards_reach_the_parts_of_a_run(tmp_path):
    client = flywheel.Client("http://127.0.0.1:9")
    parts = [client.run("t").child(name) for name in ("a", "b")]
    judge = Shuffled(replace(example(), parts=lambda _: parts), seed=1)
    await judge({"n": 1}, 1, None)
    assert [part.outcome for part in parts] == [None, None]
    await judge({"n": 2}, 2, None)
    assert [part.outcome and part.outcome.value for part in parts] == [1.0, 1.0]


async def test_nothing_that_the_honest_judge_said_of_a_part_is_left_in_a_shuffled_run():
    part = flywheel.Client("http://127.0.0.1:9").run("t").child("a")

    def honest(reply: int) -> flywheel.Reward:
        part.take(reward(reply))
        return reward(reply)

    judge = Shuffled(replace(example(), judge=honest, parts=lambda _: [part]), seed=1)
    await judge({"n": 1}, 1, None)
    assert part.outcome is None
    await judge({"n": 2}, 2, None)
    assert part.outcome == flywheel.Reward(1.0)


class Serving:
    """A client that sees these versions in service, one after another."""

    def __init__(self, *versions: int) -> None:
        self._versions = list(versions)

    def status(self) -> flywheel.Status:
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        return flywheel.Status({"versions": {"serving": version}})

    def wait_ready(self, timeout_s: float) -> None:
        """It serves."""

    def model(self, version: int) -> int:
        return version


def test_an_evaluation_that_a_new_version_interrupted_is_repeated():
    evaluated: list[int] = []

    def evaluation(version: int) -> Any:
        evaluated.append(version)
        return SimpleNamespace(failed=0 if version == 9 else 3)

    assert of_version_in_service(Serving(7, 7, 8, 8, 9, 9), evaluation).failed == 0  # type: ignore[arg-type]
    assert evaluated == [7, 8, 9]
    assert of_version_in_service(Serving(7), evaluation).failed == 3, "nothing else came into service"
