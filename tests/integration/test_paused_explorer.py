"""An explorer that stands still for longer than its leases last: a machine that sleeps, a frozen container."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from shared.config import Config
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import engines, experiences
from tests.support.processes import Process, wait_for, write_config
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import make_config, write_scripted_version


class Explorer:
    """One explorer as a process of its own."""

    def __init__(self, config: Config, file: Path) -> None:
        self.url = f"http://127.0.0.1:{config.explorer.port}"
        self.process = Process(["explorer", "-c", str(write_config(config, file))], file.with_suffix(".log"))
        wait_for(lambda: "listening" in self.process.output(), "a start", 60)
        wait_for(lambda: httpx.get(self.url + "/ready").status_code == 200, "service", 60)

    def chat(self) -> tuple[str, str]:
        """The message's id, and the weights that gave it, by the engine's own word."""
        reply = httpx.post(self.url + "/chat", json={"messages": []}, timeout=30).raise_for_status().json()
        return reply["id"], reply["choices"][0]["message"]["content"].rpartition(" ")[2]


@pytest.fixture
def ledger(tmp_path: Path, database_url: str | None) -> Iterator[Ledger]:
    opened = Ledger.open(make_config(tmp_path, ["http://e0"], database_url=database_url).ledger_url)
    yield opened
    opened.close()


@pytest.fixture
def pair(
    scripted_engine: ScriptedEngine, tmp_path: Path, database_url: str | None, ledger: Ledger
) -> Iterator[list[Explorer]]:
    """Two explorers of one engine; the first one owns it."""
    started: list[Explorer] = []
    try:
        for name in ("first", "second"):
            config = make_config(tmp_path, [scripted_engine.url], database_url=database_url)
            started.append(Explorer(config, tmp_path / f"{name}.yaml"))
        yield started
    finally:
        for explorer in started:
            explorer.process.kill()


def owner_of_engine(ledger: Ledger) -> str | None:
    with ledger.read() as connection:
        return connection.execute(select(engines.c.owner)).scalar_one()


def followed(ledger: Ledger) -> list[int]:
    """How far each living explorer has followed the engine; its owner, to what it was before it had it."""
    with ledger.read() as connection:
        living = queries.live_explorers(connection)
        moved = connection.execute(select(engines.c.owner, engines.c.generation)).one()
    return [
        moved.generation if name == moved.owner else one.generation
        for name, ones in living.items()
        for one in ones.values()
    ]


def let_the_other_take_over(pair: list[Explorer], ledger: Ledger) -> None:
    before = owner_of_engine(ledger)
    pair[0].process.send(signal.SIGSTOP)
    wait_for(lambda: owner_of_engine(ledger) not in (before, None), "another owner", 30)
    pair[0].process.send(signal.SIGCONT)


def test_an_explorer_that_was_paused_follows_the_new_owner_and_labels_what_it_records(
    pair, scripted_engine, tmp_path, ledger
):
    scripted_engine.script.on_call["/health"] = lambda: time.sleep(0.2)  # a busy engine: the heartbeat is faster
    let_the_other_take_over(pair, ledger)
    wait_for(lambda: len(generations := followed(ledger)) == 2 and len(set(generations)) == 1, "a follower", 20)
    scripted_engine.script.delay_s = 0.02
    scripted_engine.script.reload_s = 1.0
    said: dict[str, str] = {}
    enough = threading.Event()

    def customer() -> None:
        while not enough.is_set():
            name, weights = pair[0].chat()
            said[name] = weights

    customers = [threading.Thread(target=customer) for _ in range(4)]
    for thread in customers:
        thread.start()
    try:
        wait_for(lambda: len(said) > 20, "chats")
        write_scripted_version(tmp_path, 1, -1.0)
        with ledger.write() as connection:
            transitions.publish(connection, version=1, parent=0, kind="full", step=1)
        wait_for(lambda: list(said.values()).count("v000001") > 20, "chats of version 1", 30)
    finally:
        enough.set()
    for thread in customers:
        thread.join()
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.version_end)).all()
    labels = {row.msg_id: "v000001" if row.version_end == 1 else "start" for row in rows}
    assert {name: labels[name] for name in said} == said
    assert scripted_engine.script.calls.count("reload v000001") == 1
