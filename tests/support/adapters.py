"""Helpers for tests of adapters: requests to an explorer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from explorer_service.reload.adapter_controller import AdapterController
from shared.ledger.queries import list_versions
from tests.support.script import Script
from tests.support.scripted_adapters import publish_adapter
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, served, wait_until


def said(reply: httpx.Response) -> str:
    """The folder that answered, according to the scripted engine."""
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"]).rpartition(" ")[2]


def state(explorer: RunningExplorer, version: int) -> str:
    with explorer.ledger.read() as connection:
        return next(row.state for row in list_versions(connection) if row.version == version)


def engine(explorer: RunningExplorer) -> Any:
    return explorer.deps.pool.engines[0]


def publish_and_wait(explorer: RunningExplorer, *versions: int) -> None:
    for version in versions:
        publish_adapter(explorer, version)
        wait_until(lambda version=version: served(explorer) == str(version))


def limit_hung_loads(explorer: RunningExplorer, script: Script, seconds: float = 0.3) -> None:
    """Limit the time of an adapter's load while the engine hangs in it; a slow machine may need longer for others."""
    admin = explorer.deps.dispatcher._health_checks["e0"].__self__
    load = admin.load_adapter

    async def load_adapter(name: str, folder: Path) -> None:
        before = admin._load_timeout_s
        admin._load_timeout_s = seconds if "/v1/load_lora_adapter" in script.hung else before
        try:
            await load(name, folder)
        finally:
            admin._load_timeout_s = before

    admin.load_adapter = load_adapter


def restart_when_noticed(explorer: RunningExplorer, scripted_engine: ScriptedEngine) -> None:
    """Restart a dead engine once the explorer has noticed its death, however late that is."""
    pool = explorer.deps.pool
    withdraw = pool.withdraw

    def withdraw_noted(*given: Any) -> None:
        withdraw(*given)
        scripted_engine._loop.call_soon_threadsafe(scripted_engine._come_back)

    pool.withdraw = withdraw_noted  # type: ignore[method-assign]


def watch_openings(explorer: RunningExplorer) -> list[set[int]]:
    """Record what the engine serves each time it opens."""
    pool, opened_with = explorer.deps.pool, []
    serve = pool.serve

    def watched(engine: Any, versions: dict[int, str], *args: Any) -> None:
        if not engine.is_open:
            opened_with.append(set(versions))
        serve(engine, versions, *args)

    pool.serve = watched
    return opened_with


@contextmanager
def observed(explorer: RunningExplorer) -> Iterator[list[set[int]]]:
    """The versions that the engine serves, at each end of a round of its controller."""
    rounds: list[set[int]] = []
    tend = AdapterController.tend

    async def watched(self: AdapterController) -> None:
        await tend(self)
        rounds.append(set(engine(explorer).versions))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterController, "tend", watched)
        yield rounds
