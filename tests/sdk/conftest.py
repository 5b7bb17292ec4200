"""The agent's side against the real explorer over a scripted engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flywheel
import pytest
from sqlalchemy import select, update

from shared.ledger import transitions
from shared.ledger.tables import experiences, signals, trainers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config, publish, wait_until


@pytest.fixture(autouse=True)
def patient_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TrainingRunner that ends waits for its runs, however slow the machine is."""
    monkeypatch.setattr(flywheel.TrainingRunner.stop, "__defaults__", (240.0,))


@pytest.fixture
def explorer(scripted_engine: ScriptedEngine, tmp_path: Path) -> Iterator[RunningExplorer]:
    running = RunningExplorer(make_config(tmp_path, [scripted_engine.url])).wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(explorer: RunningExplorer) -> Iterator[flywheel.Client]:
    with flywheel.Client(explorer.url, retry_s=5) as opened:
        yield opened


def rows(explorer: RunningExplorer) -> list[Any]:
    """The rows of the ledger, oldest first."""
    with explorer.ledger.read() as connection:
        return list(connection.execute(select(experiences).order_by(experiences.c.id)))


def said(explorer: RunningExplorer) -> list[Any]:
    """The log of signals, oldest first."""
    with explorer.ledger.read() as connection:
        return list(connection.execute(select(signals).order_by(signals.c.id)))


def announce_trainer(explorer: RunningExplorer) -> None:
    """A trainer that trains nothing, and is alive for an hour."""
    with explorer.ledger.write() as connection:
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        connection.execute(update(trainers).values(heartbeat_at=time.time() + 3600))


def serve(explorer: RunningExplorer, version: int) -> None:
    """Publish a version, and wait until it is in service."""
    publish(explorer, version)
    wait_until(lambda: explorer.http.get("/status").json()["versions"]["serving"] == version)


def publishing(explorer: RunningExplorer, *newer: int | None) -> Callable[..., float]:
    """A workflow whose runs publish these versions, one each; None: that run publishes none."""
    left = iter(newer)

    def workflow(task: Any, model: flywheel.Model, run: flywheel.Run) -> float:
        say(model)
        if run.run_id != "eval" and (version := next(left, None)) is not None:
            serve(explorer, version)
            time.sleep(1.1)  # /status is asked for once a second
        return 0.5

    return workflow


def say(model: flywheel.Model, text: str = "hi") -> Any:
    """One chat by OpenAI's client."""
    with model.openai(max_retries=0, timeout=600) as openai:
        return openai.chat.completions.create(model=model.name, messages=[{"role": "user", "content": text}])


async def say_async(model: flywheel.Model, text: str = "hi") -> Any:
    async with model.async_openai(max_retries=0, timeout=600) as openai:
        return await openai.chat.completions.create(model=model.name, messages=[{"role": "user", "content": text}])


TASKS = [{"n": n} for n in range(6)]
COLLECT: dict[str, Any] = {"require_trainer": False, "progress": False}


async def count(task: Any, model: flywheel.Model) -> float:
    await say_async(model, f"task {task['n']}")
    return float(task["n"])


def learn(explorer: Any, tmp_path: Path, workflow: Any = count, tasks: Any = TASKS, **options: Any) -> flywheel.Report:
    given = {**COLLECT, "url": explorer.url, "folder": tmp_path / "runs", **options}
    return flywheel.learn(workflow, tasks, **given)
