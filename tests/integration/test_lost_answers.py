"""A transaction is stored, but its answer is lost: the trainer continues as if it had got the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, select

from shared.config import TrainerConfig
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import find_trainer
from shared.ledger.tables import batches, experiences
from shared.stop_request import StopRequest
from tests.support.experiences import record_ready, rows
from trainer_service.claim import Claimer


class Losing:
    """A ledger that loses one answer: of its first write if `stores`, which is stored, or else rolled back."""

    def __init__(self, ledger: Ledger, *, stores: bool) -> None:
        self._ledger, self._stores, self._lost = ledger, stores, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        loses, self._lost = not self._lost, True
        with self._ledger.write() as connection:
            yield connection
            if loses and not self._stores:
                raise LedgerError("the connection is lost before the commit")
        if loses:
            raise LedgerError("the connection is lost after the commit")


def claimed(ledger: Any, batch_size: int = 2) -> list[str] | None:
    """Return the rows of the next batch; None: there is none for a while."""
    stop = StopRequest()
    timer = threading.Timer(240, stop.set)
    timer.start()
    lease = Claimer(ledger, TrainerConfig(batch_size=batch_size, poll_interval_s=0.02), stop).next()
    timer.cancel()
    return None if lease is None else [row.msg_id for row in lease.rows]


def test_a_claim_that_was_stored_without_an_answer_is_the_next_batch(ledger):
    record_ready(ledger, rows(4))
    assert claimed(Losing(ledger, stores=True)) == ["m0", "m1"]
    assert claimed(ledger) == ["m2", "m3"]
    with ledger.read() as connection:
        assert connection.execute(select(batches.c.state)).scalars().all() == ["LEASED", "LEASED"]


def test_a_claim_that_was_rolled_back_is_made_again(ledger):
    record_ready(ledger, rows(4))
    assert claimed(Losing(ledger, stores=False)) == ["m0", "m1"]
    assert claimed(ledger) == ["m2", "m3"]


def test_a_claim_without_an_answer_whose_rows_another_trainer_holds_since_is_no_batch(ledger):
    record_ready(ledger, rows(2))
    losing = Losing(ledger, stores=True)
    taken: list[int | None] = []

    def fetch_after_takeover() -> None:
        with ledger.write() as connection:
            transitions.give_back(connection, owner="main")
            taken.append(transitions.claim(connection, owner="other", at_least=1, at_most=2, lease_s=3600))

    stop = StopRequest()
    claimer = Claimer(losing, TrainerConfig(batch_size=2, poll_interval_s=0.02, name="main"), stop)
    wait, waits = stop.wait, []

    def take_over_first(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            fetch_after_takeover()
        elif len(waits) == 20:
            stop.set()
        return wait(seconds)

    stop.wait = take_over_first
    assert claimer.next() is None
    assert len(waits) == 20
    with ledger.read() as connection:
        assert set(connection.execute(select(experiences.c.batch_id)).scalars()) == set(taken)


def test_a_state_that_was_recorded_without_an_answer_can_be_recorded_again(ledger):
    record_ready(ledger, rows(2))
    about = {"step": 1, "trainer": "t"}
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="t", at_least=1, at_most=2, lease_s=3600)
        transitions.announce_trainer(connection, name="t", step=0, version=0, state_path=None, state_sha256=None)
        version = transitions.reserve_version(connection, writer="t")
        transitions.publish_ahead(connection, version=version, parent=None, kind="full", **about)
    for _ in range(2):
        with ledger.write() as connection:
            state = {"state_path": "s", "state_sha256": None, "contained": {version: [batch]}}
            transitions.record_state(connection, version=version, **about, **state)
    with ledger.read() as connection:
        assert find_trainer(connection, "t").state_path == "s"
        assert set(connection.execute(select(experiences.c.consumed_version)).scalars()) == {version}
