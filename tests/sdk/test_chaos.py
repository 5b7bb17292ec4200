"""TrainingRunner while explorer and trainer are killed and come back: production never notices, nothing counts twice.

A short form runs in CI; FLYWHEEL_TORTURE=full takes five minutes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from typing import Any

import flywheel
import pytest
from sqlalchemy import select

from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, signals
from tests.sdk.conftest import say_async
from tests.support.forms import FULL
from tests.support.servers import wait_until
from tests.torture.whole import PARTS, Whole

AT_WORK = "at work"  # the trainer's log says it once it has started
SECONDS = 300 if FULL else 7


async def agent(request: int, model: flywheel.Model | None) -> str:
    if model is None:
        return f"production {request}"
    await say_async(model)
    return "trainee"


@pytest.mark.timeout(900)
def test_production_does_not_notice_that_explorer_and_trainer_die_and_come_back(
    scripted_engine, lives, model, tmp_path
):
    whole = Whole(tmp_path, model, scripted_engine.url, "sqlite", lives)
    acknowledged: list[str] = []
    runner = flywheel.TrainingRunner(
        whole.url, agent, noting(acknowledged), select=flywheel.SamplingRate(0.1), commit_every_s=0.5, timeout_s=10
    )
    ended = threading.Event()
    killing = threading.Thread(target=kill_at_random, args=(whole, ended))
    try:
        with flywheel.Client(whole.url) as client:
            for part in PARTS:
                whole.begin(part)
            client.wait_ready(240)
            runner.start()
            killing.start()
            answers, added_ms = asyncio.run(traffic(runner))
            ended.set()
            killing.join()
            starts = whole.log("trainer").count(AT_WORK)
            for part in PARTS:
                whole.kill(part)
                whole.begin(part)
            client.wait_ready(240)
            wait_until(lambda: whole.log("trainer").count(AT_WORK) > starts, 240)  # else a signal would kill it
            answers += asyncio.run(until_rewarded(runner, len(answers)))
        runner.stop(30.0)
        assert [whole.lives[part].stop() for part in PARTS] == [0, 0]
        stats = runner.stats
        print(f"{len(answers)} calls, added p99 {added_ms:.3f} ms, kills {dict(whole.kills)}, {stats}")
        assert answers == [f"production {number}" for number in range(len(answers))]
        assert min(whole.kills.values()) > 0
        check_ledger(whole, acknowledged, stats.rewarded)
    finally:
        ended.set()
        whole.close()


def noting(acknowledged: list[str]) -> Any:
    """A reward function that notes the task of each run that is about to be rewarded."""

    def score(run: flywheel.Run, reply: str) -> float:
        acknowledged.append(run.task_id)
        return 1.0

    return score


def kill_at_random(whole: Whole, ended: threading.Event) -> None:
    """Explorer or trainer dies and starts again, each few seconds."""
    chance = random.Random(5)
    while not ended.wait(chance.uniform(0.5, 3)):
        part = chance.choice(PARTS)
        whole.kill(part)
        ended.wait(chance.uniform(0, 1))
        whole.begin(part)


async def traffic(runner: flywheel.TrainingRunner) -> tuple[list[str], float]:
    """The answers of production at 100 calls a second, and what the slowest hundredth takes more than a bare call."""
    serve, answers = runner.watch(agent), []
    watched, bare = [], []
    begin = time.perf_counter()
    for number in range(100 * SECONDS):
        await asyncio.sleep(max(0.0, begin + number / 100 - time.perf_counter()))
        began = time.perf_counter()
        answers.append(await serve(number))
        between = time.perf_counter()
        await agent(number, None)
        watched.append(between - began)
        bare.append(time.perf_counter() - between)
    slowest = [statistics.quantiles(times, n=100)[98] for times in (watched, bare)]
    return answers, (slowest[0] - slowest[1]) * 1e3


async def until_rewarded(runner: flywheel.TrainingRunner, number: int) -> list[str]:
    """Further answers: on a busy machine the explorer may not have lived for long enough to reward a run."""
    serve, answers, deadline = runner.watch(agent), [], time.monotonic() + 240
    while not runner.stats.rewarded and time.monotonic() < deadline:
        answers.append(await serve(number + len(answers)))
        await asyncio.sleep(0.01)
    return answers


def check_ledger(whole: Whole, asked: list[str], rewarded: int) -> None:
    """Every reward that was acknowledged stands, once, and what was not may stand once, too."""
    ledger = Ledger.open(whole.config.ledger_url)
    with ledger.read() as connection:
        found = connection.execute(select(experiences.c.task_id).where(experiences.c.reward.is_not(None))).scalars()
        rows = Counter(found)
        counted = Counter(connection.execute(select(signals.c.msg_id)).scalars())
    ledger.close()
    assert rewarded > 0
    assert rewarded <= len(rows) <= len(asked)
    assert set(rows) <= set(asked)
    assert set(rows.values()) == {1}
    assert set(counted.values()) == {1}
    assert len(counted) == len(rows)
