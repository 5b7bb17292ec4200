"""Evaluations over the real explorer: pinned to a version, unrecorded, and the end of `learn` when nothing improves."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import flywheel
import httpx
import openai
import pytest
from flywheel.page import page
from flywheel.transport import Chats, Pin, current_pin

from tests.sdk.conftest import TASKS, count, learn, publishing, rows, say, serve
from tests.support.time_limits import end_when

counted = itertools.count()


def test_an_evaluation_is_pinned_and_nothing_of_it_is_recorded(explorer, tmp_path, scripted_engine):
    found = flywheel.evaluate(count, TASKS, model=0, url=explorer.url, runs_per_task=2, params={"temperature": 0.0})
    assert (found.version, found.n, found.mean, found.failed) == (0, 12, 2.5, 0)
    assert found.solved == 5 / 6
    assert rows(explorer) == []
    assert {body["temperature"] for body in scripted_engine.script.bodies} == {0.0}
    both = flywheel.compare(count, TASKS, 0, 0, url=explorer.url)
    assert (both.difference, both.standard_error) == (0.0, 0.0)


def test_chats_of_a_model_object_that_outlives_runs_are_pinned_and_unrecorded_too(explorer, scripted_engine):
    url = f"{explorer.url}/v1"
    with openai.OpenAI(base_url=url, api_key="k", http_client=flywheel.http_client(), max_retries=0) as client:

        def workflow(task: Any) -> float:
            client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
            return 1.0

        given: dict[str, Any] = {"url": explorer.url, "params": {"temperature": 0.0}}
        assert flywheel.evaluate(workflow, TASKS, model=0, **given).n == len(TASKS)
        assert {body["temperature"] for body in scripted_engine.script.bodies} == {0.0}
        assert flywheel.evaluate(workflow, TASKS, model=7, **given).failed == len(TASKS), "it is not in service"
    assert rows(explorer) == []


async def test_a_request_to_another_host_is_not_read_in_an_evaluation():
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "agent"}'

    token = current_pin.set(Pin("http://explorer:8010", "agent", {"store": False}, {}))
    try:
        request = httpx.Request("POST", "http://other:8010/upload", content=pieces())
        assert Chats(None, {}, {}).prepare(request)[0] is request
    finally:
        current_pin.reset(token)


def test_runs_of_one_task_are_not_counted_as_further_tasks(explorer):
    found = flywheel.evaluate(lambda task, model: float(task["n"]), TASKS[:2], url=explorer.url, runs_per_task=4)
    assert (found.n, found.mean, found.standard_error) == (8, 0.5, 0.5), "as of two tasks, which tell nothing more"
    one = flywheel.evaluate(
        lambda task, model: float(next(counted) % 2), TASKS[:1], url=explorer.url, runs_per_task=4, at_once=1
    )
    assert one.standard_error == pytest.approx(3**-0.5 / 2), "of one task: over its runs"


def test_learn_evaluates_and_stops_early(explorer, tmp_path):
    report = learn(explorer, tmp_path, eval_tasks=TASKS[:2], stop=flywheel.EarlyStop(patience=1))
    assert [evaluation.mean for evaluation in report.evaluations] == [0.5]
    assert len(rows(explorer)) == 6
    assert json.loads((tmp_path / "runs/report.json").read_text())["evaluations"][0]["n"] == 2


def test_evaluations_of_new_versions_that_are_no_better_stop_it_early(explorer, tmp_path):
    workflow = publishing(explorer, 2, None, 3)  # a version is in service until it was evaluated
    serve(explorer, 1)
    stop = flywheel.EarlyStop(patience=2)
    given: dict[str, Any] = {"eval_tasks": TASKS[:1], "eval_every_versions": 1, "at_once": 1, "stop": stop}
    report = learn(explorer, tmp_path, workflow, [{"n": n} for n in range(20)], **given)
    assert (report.stopped, report.version_first) == ("early", 1)
    assert report.runs < 10
    assert [(evaluation.version, evaluation.n) for evaluation in report.evaluations] == [(1, 1), (2, 1), (3, 1)]


class Moving:
    """A workflow in whose first run the next version comes into service, so that a run of this one is refused."""

    def __init__(self, explorer: Any) -> None:
        self.explorer, self.versions = explorer, []
        serve(explorer, 1)

    def __call__(self, task: Any, model: flywheel.Model) -> float:
        self.versions.append(model.version)
        if len(self.versions) == 1:
            serve(self.explorer, 2)
        say(model)
        return 1.0


def test_an_evaluation_of_the_version_in_service_is_repeated_if_it_is_replaced(explorer):
    moving = Moving(explorer)
    found = flywheel.evaluate(moving, TASKS[:3], url=explorer.url, at_once=1)
    assert (found.version, found.n, found.failed) == (2, 3, 0)
    assert moving.versions == [1, 1, 1, 2, 2, 2]


def test_learn_repeats_an_evaluation_if_the_version_is_replaced(explorer, tmp_path):
    report = learn(explorer, tmp_path, Moving(explorer), TASKS[:3], eval_tasks=TASKS[:2], at_once=1)
    assert [(one.version, one.n, one.failed) for one in report.evaluations] == [(2, 2, 0)]


def test_the_last_version_is_evaluated_when_the_time_is_up(explorer, tmp_path, monkeypatch):
    newer: list[int] = []
    end_when(monkeypatch, lambda: bool(newer))

    def slow(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        say(model)
        if run.run_id != "eval" and explorer.http.get("/status").json()["versions"]["serving"] == 1:
            serve(explorer, 2)
            newer.append(2)
        time.sleep(0.3)
        return 1.0

    serve(explorer, 1)
    report = learn(
        explorer, tmp_path, slow, [{"n": n} for n in range(40)], eval_tasks=TASKS[:1], at_once=1, seconds=1.0
    )
    assert report.stopped == "time"
    assert [one.version for one in report.evaluations] == [1, 2]


def test_failures_in_an_evaluation_are_reported_with_their_cause(explorer, tmp_path, capsys):
    def fails(task: Any, model: flywheel.Model, run: flywheel.Run) -> Any:
        if run.run_id == "eval" and task == TASKS[0]:
            raise ValueError("no action in\n'hello' <b>")
        if run.run_id == "eval" and task == TASKS[2]:
            raise ValueError("half \ud83d of a character")
        if run.run_id == "eval" and task == TASKS[1]:
            return flywheel.Reward(None, metrics={"steps": 1.0})
        say(model)
        return 0.5

    report = learn(explorer, tmp_path, fails, TASKS[:4], eval_tasks=TASKS[:4], progress=True)
    [found] = report.evaluations
    assert (found.n, found.failed, found.after_runs) == (1, 3, 0)
    half = "ValueError: half \ud83d of a character"
    assert found.failures == {"ValueError: no action in 'hello' <b>": 1, "no reward": 1, half: 1}
    assert "0.500 ± 0.000 over 1 runs, 3 failed, such as " in capsys.readouterr().err
    page = (tmp_path / "runs/report.html").read_text()
    assert "ValueError: no action in &#x27;hello&#x27; &lt;b&gt;: 1" in page and "half ? of" in page
    assert page.count("<circle ") == 1, "the evaluation stands in the picture"


def test_the_picture_shows_an_evaluation_after_half_of_the_runs_in_its_middle_though_half_of_them_have_no_reward():
    halfway = flywheel.Evaluation(1, 2, mean=0.5, standard_error=0.1, solved=0.5, metrics={}, after_runs=50)
    report = flywheel.Report(name="x", runs=100, rewarded=50, evaluations=[halfway])
    assert 'cx="400.0"' in page(report, [0.5] * 50)


def test_a_sync_function_that_hangs_does_not_hold_up_an_evaluation():
    release, found = threading.Event(), []
    given: dict[str, Any] = {"model": 0, "url": "http://127.0.0.1:9", "timeout_s": 0.2}

    def evaluates() -> None:
        found.append(flywheel.evaluate(lambda task: release.wait(120), TASKS[:1], **given))

    evaluating = threading.Thread(target=evaluates, daemon=True)
    evaluating.start()
    evaluating.join(60)
    assert not release.is_set()
    assert [(one.n, one.failed) for one in found] == [(0, 1)]
    release.set()


@pytest.mark.parametrize("name", ["@cf/meta/llama-3.1-8b-instruct", "claude-3-5-sonnet@20240620"])
def test_a_model_of_another_provider_has_no_version_whatever_its_name(name):
    model = flywheel.Model.of("http://127.0.0.1:9/v1", name, key="k")
    found = flywheel.evaluate(lambda task: 1.0, TASKS[:1], model=model, url="http://127.0.0.1:9")
    assert (found.version, found.n) == (None, 1)


def test_an_alias_of_the_explorer_s_model_has_no_version():
    with flywheel.Client("http://127.0.0.1:9", model="agent@next") as client:
        found = flywheel.evaluate(lambda task: 1.0, TASKS[:1], model=client.model(), url=client.url)
        assert (found.version, found.n) == (None, 1)
        assert flywheel.evaluate(lambda task: 1.0, TASKS[:1], model=client.model(7), url=client.url).version == 7


def test_an_evaluation_in_which_every_run_failed_is_no_result_that_stops_learn(explorer, tmp_path):
    async def earns_little(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        await count(task, model)
        if run.run_id == "eval" and fails:
            raise RuntimeError("on purpose")
        return -0.5

    stopped = []
    for fails in (True, False):  # noqa: B007 — the second start goes on with the first one's evaluation
        given: dict[str, Any] = {"eval_tasks": TASKS[:1], "stop": flywheel.EarlyStop(patience=1)}
        report = learn(explorer, tmp_path, earns_little, TASKS[:1], **given)
        stopped.append(report.stopped)
    assert [(one.n, one.mean) for one in report.evaluations] == [(0, 0.0), (1, -0.5)]
    assert stopped == ["done", "done"]


def test_two_evaluations_without_a_task_in_common_give_no_difference():
    def of(version: int, rewards: dict[str, float], failures: dict[str, int]) -> flywheel.Evaluation:
        given: dict[str, Any] = {"failed": sum(failures.values()), "failures": failures, "rewards": rewards}
        return flywheel.Evaluation(version, len(rewards), 0.0, 0.0, 0.0, {}, **given)

    gone = of(0, {}, {"TimedOut: it took": 1, "NotFoundError: version 0": 2})
    with pytest.raises(flywheel.NothingCompared) as found:
        flywheel.Comparison.of(gone, of(12, {"a": 0.5, "b": 1.0}, {}))
    said = str(found.value)
    assert "version 0: 3 of 3 runs gave no reward, most of them by NotFoundError: version 0" in said
    assert "version 12: 0 of 2 runs gave no reward" in said
    assert "model.kind: full" in said and "model.kind: lora" in said and "Comparison.of(a, b)" in said
    assert isinstance(found.value, flywheel.FlywheelError)
    with pytest.raises(flywheel.NothingCompared, match="they have no task in common: evaluate both on the same"):
        flywheel.Comparison.of(of(0, {"a": 0.5}, {}), of(1, {"b": 0.5}, {}))


def test_a_version_that_is_no_longer_in_service_is_not_compared_as_equal(explorer):
    serve(explorer, 1)
    with pytest.raises(flywheel.NothingCompared, match=r"version 0: 6 of 6 runs gave no reward, most .* NotFound"):
        flywheel.compare(count, TASKS, 0, 1, url=explorer.url)
    kept = flywheel.evaluate(count, TASKS, model=1, url=explorer.url)
    serve(explorer, 2)
    found = flywheel.Comparison.of(kept, flywheel.evaluate(count, TASKS, model=2, url=explorer.url))
    assert (found.difference, found.a.version, found.b.version) == (0.0, 1, 2)


def test_an_evaluation_states_how_many_runs_were_before_it(explorer, tmp_path):
    async def workflow(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        if run.run_id != "eval" and task == TASKS[-1]:
            serve(explorer, 1)
            await asyncio.sleep(1.1)  # /status is asked for once a second
        return await count(task, model)

    report = learn(explorer, tmp_path, workflow, eval_tasks=TASKS[:1])
    assert [found.after_runs for found in report.evaluations] == [0, len(TASKS)]


async def test_an_evaluation_that_failed_starts_at_most_the_run_that_was_next(explorer):
    started = []

    async def workflow(task: Any, model: flywheel.Model) -> float:
        started.append(task)
        if len(started) == 1:
            raise flywheel.ConfigError("a wrong argument")
        await asyncio.sleep(0)
        return 1.0

    with pytest.raises(flywheel.ConfigError):
        await flywheel.aevaluate(workflow, TASKS, model=0, url=explorer.url, at_once=1)
    await asyncio.sleep(0.1)
    assert len(started) <= 2


def test_an_evaluation_of_no_runs_is_refused(explorer):
    with pytest.raises(flywheel.ConfigError, match="runs_per_task=0"):
        flywheel.evaluate(lambda task: 1.0, TASKS, model=0, url=explorer.url, runs_per_task=0)
