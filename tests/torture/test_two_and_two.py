"""Two explorers and two claimers on one PostgreSQL, under load: every row is counted once, and trained on once.

A short form runs in CI; FLYWHEEL_TORTURE=full runs for ten minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select

from shared.config import Config, TrainerConfig
from shared.experience import State
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import batches, experiences
from shared.stop_request import StopRequest
from tests.support.books import Books
from tests.support.forms import FULL
from tests.support.processes import Process, wait_for, write_config
from tests.support.servers import free_port
from trainer_service.claim import Claimer

pytestmark = pytest.mark.torture
SECONDS = 600.0 if FULL else 4.0


class Learner:
    """A trainer without a model: claims, and makes a version official for every other batch; gives the rest back."""

    def __init__(self, ledger: Ledger, name: str, versions: itertools.count[int], stop: StopRequest) -> None:
        config = {"name": name, "batch_size": 8, "batch_timeout_s": 0.2, "poll_interval_s": 0.02}
        self._claimer = Claimer(ledger, TrainerConfig.model_validate(config), stop)
        self._ledger, self._name, self._versions = ledger, name, versions
        self.trained: dict[tuple[str, int], int] = {}
        self.given_back = 0
        self.thread = threading.Thread(target=self._run, name=name)
        self.thread.start()

    def _run(self) -> None:
        for turn in itertools.count():
            lease = self._claimer.next()
            if lease is None:
                return
            if turn % 7 == 3:
                with self._ledger.write() as connection:
                    self.given_back += transitions.give_back(connection, owner=self._name)
                continue
            version = next(self._versions)
            about = {"parent": None, "kind": "full", "step": version, "trainer": self._name}
            with self._ledger.write() as connection:
                transitions.publish(connection, version=version, **about, batch_ids=[lease.batch_id])
            for row in lease.rows:
                assert (row.msg_id, row.choice) not in self.trained, "trained on twice by one trainer"
                self.trained[row.msg_id, row.choice] = version


@pytest.mark.timeout(900)
def test_the_count_is_exact(tmp_path: Path, scripted_engine, postgres):
    root = {
        "root_dir": str(tmp_path / "data"),
        "database_url": postgres.new_database(),
        "model": {"path": str(tmp_path)},
    }
    engines = [{"name": "e0", "url": scripted_engine.url}]
    configs = [Config.model_validate({**root, "explorer": {"port": free_port(), "engines": engines}}) for _ in range(2)]
    books = [Books(f"http://127.0.0.1:{config.explorer.port}") for config in configs]
    ledger = Ledger.open(configs[0].ledger_url)
    stop, versions = StopRequest(), itertools.count(1)
    scripted_engine.script.reload_s = 0.0
    processes = []
    try:
        for number, config in enumerate(configs):
            file = write_config(config, tmp_path / f"{number}.yaml")
            processes.append(Process(["explorer", "-c", str(file)], tmp_path / f"{number}.log"))
        for book in books:
            book.open(4)
        wait_for(lambda: all(book.rewards for book in books), "service", 240)
        learners = [Learner(ledger, name, versions, stop) for name in ("t1", "t2")]
        threading.Event().wait(SECONDS)
        for book in books:
            book.close()
        with ledger.write() as connection:
            transitions.commit(connection)

        def nothing_waits() -> bool:  # nor is held by a learner that may give it back
            with ledger.read() as connection:
                waiting = experiences.c.state.in_((State.READY, State.LEASED))
                return connection.execute(select(experiences.c.id).where(waiting).limit(1)).first() is None

        wait_for(nothing_waits, "all rows trained on", 120)
        stop.set()
        for learner in learners:
            learner.thread.join(120)
    finally:
        stop.set()
        for book in books:
            book.close()
        exits = [process.stop() for process in processes]
    assert exits == [0, 0]
    with contextlib.closing(ledger):
        _count(ledger, books, learners)


def _count(ledger: Ledger, books: list[Books], learners: list[Learner]) -> None:
    chats = set().union(*(book.chats for book in books))
    rewards = {name: value for book in books for name, value in book.rewards.items()}
    trained = Counter(key for learner in learners for key in learner.trained)
    with ledger.read() as connection:
        rows = connection.execute(select(experiences)).all()
        held = connection.execute(select(batches.c.id).where(batches.c.state == "LEASED")).all()
    stands = {(row.msg_id, row.choice): row for row in rows}
    assert len(rows) == len(stands), "a row stands twice"
    assert chats <= {row.msg_id for row in rows}, "an acknowledged chat is missing"
    assert {name: stands[name, 0].reward for name in rewards} == rewards
    assert set(trained.values()) == {1}, "a row was trained on by both"
    assert {key for key, row in stands.items() if row.state == "CONSUMED"} == set(trained)
    assert {key for key, row in stands.items() if row.reward is not None} == set(trained), "a ready row was left out"
    for learner in learners:
        assert all(stands[key].consumed_version == version for key, version in learner.trained.items())
    assert not held
    print(f"{len(rows)} rows, {len(trained)} trained on once, {sum(one.given_back for one in learners)} given back")
