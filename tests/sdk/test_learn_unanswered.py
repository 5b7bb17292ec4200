"""learn of an explorer that does not answer: the end of the time and Ctrl-C end it, and the report is written."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flywheel
import pytest
from flywheel import pace, schedule

from tests.sdk.conftest import COLLECT, TASKS, count, learn, say_async
from tests.sdk.test_client import answering
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config, publish
from tests.support.time_limits import end_when


@pytest.fixture(params=["the time is up", "Ctrl-C"])
def ended(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[str, Any, list[str]]]]:
    """An explorer out of service at whose first request learn is ended: how, its address, and what it was asked."""
    asked: list[str] = []

    def refuse(_number: int, request_: Any) -> Any:
        asked.append(request_.path)
        if request.param == "Ctrl-C" and len(asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return 503, {"Retry-After": "100"}, b"{}"

    end_when(monkeypatch, lambda: bool(asked) and request.param != "Ctrl-C")
    with answering(refuse) as url:
        yield lambda: ("interrupted" if request.param == "Ctrl-C" else "time", url, asked)


def at(url: str) -> Any:
    """An explorer, of which only the address is known."""
    return SimpleNamespace(url=url)


def report_of(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "runs/report.json").read_text())


def test_an_explorer_that_never_answered_is_not_waited_for_after_the_end(ended, tmp_path):
    how, url, asked = ended()
    report = learn(at(url), tmp_path, seconds=0.1, eval_tasks=TASKS[:1])
    assert (report.stopped, report.runs, report.evaluations) == (how, 0, [])
    assert report_of(tmp_path)["stopped"] == how
    assert asked == ["/status"]


def test_nor_is_one_that_does_not_say_which_ledger_it_has(ended, explorer, tmp_path):
    publish(explorer, 0)
    assert learn(explorer, tmp_path, tasks=TASKS[:2]).rewarded == 2
    how, url, asked = ended()
    report = learn(at(url), tmp_path, tasks=TASKS[:2], seconds=0.1)
    assert (report.stopped, report.runs, report.rewarded) == (how, 2, 2)
    assert asked == ["/versions?before=1"]


def test_feedback_that_could_not_be_sent_again_is_sent_by_a_later_start(ended, explorer, tmp_path):
    assert learn(explorer, tmp_path, tasks=TASKS[:1]).rewarded == 1
    journal = tmp_path / "runs/journal.jsonl"
    lines = [line for line in journal.read_text().splitlines() if json.loads(line)["kind"] not in ("sent", "ledger")]
    journal.write_text("".join(f"{line}\n" for line in lines))
    how, url, asked = ended()
    assert learn(at(url), tmp_path, tasks=TASKS[:1], seconds=0.1).stopped == how
    assert asked == ["/feedback"]
    assert '"sent"' not in journal.read_text()
    assert learn(explorer, tmp_path, tasks=TASKS[:1]).stopped == "done"
    assert '"sent"' in journal.read_text()


def test_ctrl_c_after_the_explorer_was_lost_is_not_held_up_by_the_version_for_the_report(
    scripted_engine: ScriptedEngine, tmp_path, monkeypatch
):
    monkeypatch.setattr(schedule, "LAST_LOOK_S", 0.1)
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url])).wait_ready()

    async def workflow(task: Any, model: flywheel.Model) -> float:
        await asyncio.to_thread(explorer.stop)
        signal.raise_signal(signal.SIGINT)
        await say_async(model)
        return 1.0

    assert learn(explorer, tmp_path, workflow, TASKS[:1]).stopped == "interrupted"


async def test_a_wait_for_an_answer_is_logged_with_the_address_and_without_its_password(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pace, "_QUIET_S", 0.0)
    with answering(lambda *_: (503, {}, b"{}")) as url:
        async with flywheel.AsyncClient(url.replace("://", "://me:secret@"), retry_s=0.5) as client:
            with pytest.raises(flywheel.Refused):
                await flywheel.alearn(count, TASKS, client=client, folder=tmp_path, **COLLECT)
    assert caplog.messages == [f"no answer from {url} yet; trying for up to 0.5 s"]


def test_the_end_of_the_time_ends_an_evaluation_that_waits_for_a_lost_explorer(
    scripted_engine: ScriptedEngine, tmp_path, monkeypatch
):
    monkeypatch.setattr(pace, "LAST_LOOK_S", 0.1)
    explorer = RunningExplorer(make_config(tmp_path, [scripted_engine.url])).wait_ready()
    lost = threading.Event()
    end_when(monkeypatch, lost.is_set)

    async def workflow(task: Any, model: flywheel.Model) -> float:
        await asyncio.to_thread(explorer.stop)
        lost.set()
        raise ValueError("a failed run of an evaluation, after which the version in service is asked for")

    report = learn(explorer, tmp_path, workflow, TASKS[:1], eval_tasks=TASKS[:1], seconds=0.1)
    assert (report.stopped, report.runs) == ("time", 0)
    assert [one.failed for one in report.evaluations] == [1]
