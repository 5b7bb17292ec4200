"""An explorer that stands still for longer than its leases last: a machine that sleeps, a frozen container."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from shared.config import Config
from shared.errors import LedgerError
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.driver import answering_within
from shared.ledger.tables import engines, experiences
from tests.support.processes import Process, wait_for, write_config
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import make_config, write_scripted_version


class Explorer:
    """One explorer as a process of its own."""

    def __init__(self, config: Config, file: Path) -> None:
        self.url, self.config = f"http://127.0.0.1:{config.explorer.port}", config
        self.process = Process(["explorer", "-c", str(write_config(config, file))], file.with_suffix(".log"))
        wait_for(lambda: "listening" in self.process.output(), "a start", 240)
        wait_for(lambda: httpx.get(self.url + "/ready", timeout=240).status_code == 200, "service", 240)

    def chat(self) -> tuple[str, str]:
        """The message's id, and the weights that gave it, by the engine's own word."""
        answer = httpx.post(self.url + "/chat", json={"messages": []}, timeout=240)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        return reply["id"], reply["choices"][0]["message"]["content"].rpartition(" ")[2]

    def stand_still(self) -> None:
        """Stop it outside of a transaction: with SQLite's lock, it would hold up everybody."""
        with contextlib.closing(Ledger.open(self.config.ledger_url, answering_within(2.0))) as ledger:
            while True:
                self.process.send(signal.SIGSTOP)
                try:
                    with ledger.write():
                        return
                except LedgerError:
                    self.process.send(signal.SIGCONT)
                    time.sleep(0.1)

    def owns_engine(self, ledger: Ledger) -> bool:
        return f"-{self.process.pid}-" in (owner_of_engine(ledger) or "")


@pytest.fixture
def pair(
    scripted_engine: ScriptedEngine, tmp_path: Path, database_url: str | None, ledger: Ledger
) -> Iterator[list[Explorer]]:
    """Two explorers of one engine; one of them owns it."""
    started: list[Explorer] = []
    try:
        for name in ("first", "second"):
            config = make_config(tmp_path, [scripted_engine.url], database_url=database_url, engine_wait_s=200.0)
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


def by_ownership(pair: list[Explorer], ledger: Ledger) -> list[Explorer]:
    """The owner of the engine first: one that is slow has lost it to the other."""
    return sorted(pair, key=lambda explorer: not explorer.owns_engine(ledger))


def freeze(owner: Explorer, other: Explorer, ledger: Ledger) -> None:
    """Stop the owner, until the other one has taken over."""
    owner.stand_still()
    wait_for(lambda: other.owns_engine(ledger), "another owner", 240)


def wait_for_follower(ledger: Ledger) -> None:
    wait_for(lambda: len(generations := followed(ledger)) == 2 and len(set(generations)) == 1, "a follower", 240)


def test_an_explorer_that_was_paused_follows_the_new_owner_and_labels_what_it_records(
    pair, scripted_engine, tmp_path, ledger
):
    scripted_engine.script.on_call["/health"] = lambda: time.sleep(0.2)  # a busy engine: the heartbeat is faster
    paused, other = by_ownership(pair, ledger)
    freeze(paused, other, ledger)
    paused.process.send(signal.SIGCONT)
    wait_for_follower(ledger)
    scripted_engine.script.delay_s = 0.02
    scripted_engine.script.reload_s = 1.0
    said: dict[str, str] = {}
    enough = threading.Event()

    def customer() -> None:
        while not enough.is_set():
            name, weights = paused.chat()
            said[name] = weights

    customers = [threading.Thread(target=customer) for _ in range(4)]
    for thread in customers:
        thread.start()
    try:
        wait_for(lambda: len(said) > 20, "chats")
        write_scripted_version(tmp_path, 1, -1.0)
        with ledger.write() as connection:
            transitions.publish(connection, version=1, parent=0, kind="full", step=1)
        wait_for(lambda: list(said.values()).count("v000001") > 20, "chats of version 1", 240)
    finally:
        enough.set()
    for thread in customers:
        thread.join()
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.version_end)).all()
    labels = {row.msg_id: "v000001" if row.version_end == 1 else "start" for row in rows}
    assert {name: labels[name] for name in said} == said
    assert scripted_engine.script.calls.count("reload v000001") == 1


def publish_row(root: Path, ledger: Ledger, version: int) -> None:
    write_scripted_version(root, version, -1.0 - version)
    with ledger.write() as connection:
        parent = version - 1 if version else None
        transitions.publish(connection, version=version, parent=parent, kind="full", step=version)


def both_serve(pair: list[Explorer], version: int) -> None:
    weights = f"v{version:06d}"
    wait_for(lambda: all(explorer.chat()[1] == weights for explorer in pair), f"version {version}", 240)


@pytest.fixture
def version_0_serves(pair: list[Explorer], tmp_path: Path, ledger: Ledger) -> None:
    publish_row(tmp_path, ledger, 0)
    both_serve(pair, 0)


ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@ON_SQLITE
@pytest.mark.usefixtures("version_0_serves")
def test_an_owner_that_stood_still_in_a_take_up_does_nothing_more_to_an_engine_that_another_one_has_moved(
    pair, scripted_engine, tmp_path, ledger
):
    script, found, is_stopped = scripted_engine.script, [], threading.Event()

    def stop() -> None:
        if not found:
            found.extend(by_ownership(pair, ledger))
            found[0].stand_still()
            is_stopped.set()

    script.on_call["/pause"] = stop
    publish_row(tmp_path, ledger, 1)
    assert is_stopped.wait(240)
    stopped, other = found
    freeze(stopped, other, ledger)
    for version in (1, 2):
        both_serve([other], version)
        if version == 1:
            publish_row(tmp_path, ledger, 2)
    calls = len(script.calls)
    stopped.process.send(signal.SIGCONT)
    wait_for_follower(ledger)
    both_serve(pair, 2)
    assert not [call for call in script.calls[calls:] if call.startswith("reload") or call == "/resume"]
    assert script.label.startswith("2:")


@ON_SQLITE
@pytest.mark.usefixtures("version_0_serves")
def test_an_owner_that_stood_still_does_not_resume_an_engine_in_another_ones_load(
    pair, scripted_engine, tmp_path, ledger
):
    script = scripted_engine.script
    stopped, other = by_ownership(pair, ledger)
    script.delay_s = 600.0
    caller = threading.Thread(target=ask_in_vain, args=(stopped,))
    caller.start()
    wait_for(lambda: len(script.bodies) > 0, "a chat in flight")
    time.sleep(1.0)  # the owner has seen it there
    freeze(stopped, other, ledger)
    time.sleep(5.0)  # longer than a chat may stand before an engine is taken for paused by nobody
    script.hung_loads = {"v000001"}
    publish_row(tmp_path, ledger, 1)
    wait_for(lambda: "reload v000001" in script.calls, "the load", 240)
    calls = len(script.calls)
    stopped.process.send(signal.SIGCONT)
    wait_for_follower(ledger)
    assert "/resume" not in script.calls[calls:] and script.paused
    script.hung_loads, script.delay_s = set(), 0.0
    stopped.process.kill()
    caller.join()


def ask_in_vain(explorer: Explorer) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the explorer is killed
        explorer.chat()


@ON_SQLITE
@pytest.mark.usefixtures("version_0_serves")
def test_a_follower_that_stood_still_in_a_reload_labels_the_chats_that_waited_for_it(
    pair, scripted_engine, tmp_path, ledger
):
    owner, follower = by_ownership(pair, ledger)
    follower.stand_still()
    publish_row(tmp_path, ledger, 1)
    both_serve([owner], 1)
    said: dict[str, str] = {}

    def customer() -> None:
        name, weights = follower.chat()
        said[name] = weights

    customers = [threading.Thread(target=customer) for _ in range(6)]
    for thread in customers:
        thread.start()
    time.sleep(0.5)  # they are connected, and wait
    follower.process.send(signal.SIGCONT)
    for thread in customers:
        thread.join()
    with ledger.read() as connection:
        rows = connection.execute(select(experiences.c.msg_id, experiences.c.version_end)).all()
    labels = {row.msg_id: f"v{row.version_end:06d}" for row in rows}
    assert len(said) == 6
    assert {name: labels[name] for name in said} == said


@ON_SQLITE
@pytest.mark.usefixtures("version_0_serves")
def test_streams_of_an_owner_that_stood_still_while_a_version_was_staged_go_on_under_what_another_one_has_loaded(
    pair, scripted_engine, tmp_path, ledger
):
    script, ends = scripted_engine.script, threading.Event()
    stopped, other = by_ownership(pair, ledger)
    asked: list[float] = []

    def stage() -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            ends.wait(500)

    script.on_call["/flywheel/stage"] = stage
    script.stream_slowly()
    lines: list[str] = []
    caller = threading.Thread(target=read_stream, args=(stopped, lines))
    caller.start()
    wait_for(lambda: len(lines) > 1, "a stream")
    publish_row(tmp_path, ledger, 1)
    wait_for(lambda: bool(asked), "staging")
    freeze(stopped, other, ledger)
    both_serve([other], 1)
    stopped.process.send(signal.SIGCONT)
    wait_for(lambda: "the engine was moved" in stopped.process.output(), "a look at what the engine serves", 240)
    script.gap_s = 0.0
    caller.join(240)
    ends.set()
    assert lines[-1] == "data: [DONE]"
    with ledger.read() as connection:
        crossed = connection.execute(select(experiences.c.version_end).where(experiences.c.version == 0))
        assert sorted(crossed.scalars())[-1] == 1


def read_stream(explorer: Explorer, lines: list[str]) -> None:
    body = {"messages": [], "stream": True}
    with httpx.stream("POST", explorer.url + "/chat", json=body, timeout=500) as reply:
        for line in filter(None, reply.iter_lines()):
            lines.append(line)
