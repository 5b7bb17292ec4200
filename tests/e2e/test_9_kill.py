"""kill -9 of explorer, engine and trainer under load: each comes back, and nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass, field

import httpx
import pytest
from sqlalchemy import select

from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences
from tests.e2e.conftest import Live
from tests.support.processes import wait_for

pytestmark = pytest.mark.engine


@dataclass(slots=True)
class Load:
    """Customers that chat, rate and commit, and keep their own books of what was acknowledged."""

    live: Live
    chats: set[str] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._customer, args=(n,)) for n in range(6)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(200)  # three requests

    def _customer(self, number: int) -> None:
        with httpx.Client(base_url=str(self.live.http.base_url), timeout=60) as http:
            turn = 0
            while not self._stop.wait(0.05):
                turn += 1
                try:
                    self._once(http, f"w{number} w{turn % 150}", float(turn % 3) / 2)
                except httpx.HTTPError:  # refused or cut off: not acknowledged, so nothing is promised
                    self.refused += 1
                    self._stop.wait(0.3)

    def _once(self, http: httpx.Client, prompt: str, reward: float) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
        msg_id = http.post("/v1/chat/completions", json=body).raise_for_status().json()["id"]
        self.chats.add(msg_id)
        answer = http.post("/feedback", json={"msg_ids": [msg_id], "reward": reward}).raise_for_status().json()
        if answer["receipts"][0]["state"] in ("applied", "updated", "duplicate"):
            self.rewards[msg_id] = reward
        http.post("/commit").raise_for_status()


def pid_of(live: Live, name: str) -> int:
    """The process that runs now, by the supervisor's log."""
    pids = re.findall(rf"started +process={name} pid=(\d+)", live.process.output())
    return int(pids[-1])


def vllm_pid(live: Live) -> int:
    """vLLM's own server below `flywheel engine`."""
    import psutil

    return int(psutil.Process(pid_of(live, "engine-e0")).children()[0].pid)


@pytest.mark.parametrize("victim", ["explorer", "trainer", "vllm", "engine-e0"])
def test_killed_under_load_it_comes_back_and_no_acknowledged_row_is_lost(live, victim):
    with Load(live) as load:
        wait_for(lambda: len(load.rewards) > 30, "some load", 240)
        pid = vllm_pid(live) if victim == "vllm" else pid_of(live, victim)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not _runs(pid), "its end", 60)
        at, version = len(load.chats), _newest_served(live)
        wait_for(lambda: len(load.chats) > at + 30, "chats going on", 240)
        wait_for(lambda: _newest_served(live) > version + 1, "new versions after the kill", 300)
    _check_books(live, load)
    assert "Traceback" not in live.process.output()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _newest_served(live: Live) -> int:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        version = max(row.version for row in list_versions(connection) if row.served_at is not None)
    ledger.close()
    return version


def _check_books(live: Live, load: Load) -> None:
    ledger = Ledger.open(live.config.ledger_url)
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.choice, experiences.c.reward)).all()
    ledger.close()
    ids = {row.msg_id for row in rows}
    assert len(rows) == len({(row.msg_id, row.choice) for row in rows}), "a row stands twice"
    assert load.chats <= ids, f"{len(load.chats - ids)} acknowledged chats are missing"
    kept = {row.msg_id: row.reward for row in rows}
    assert {name: kept[name] for name in load.rewards} == load.rewards
