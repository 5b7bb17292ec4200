"""The next turn of a conversation is recorded while the turns before it are deleted (PostgreSQL)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from sqlalchemy import Connection, event, func, select, update

from shared.experience import Sample, State, Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences, payloads
from tests.integration.test_ledger_races import wait_for_lock
from tests.support.samples import sample


@pytest.fixture
def ledger(postgres) -> Iterator[Ledger]:
    opened = Ledger.open(postgres.new_ledger().replace("postgresql://", "postgresql+psycopg://"))
    yield opened
    opened.close()


def turn(number: int) -> Sample:
    """Turn `number` of a conversation: its prompt begins with the turns before it, 40 tokens each."""
    prompt = np.arange(40 * number + 39, dtype=np.int32)
    tokens = Tokens(prompt, np.array([len(prompt)], np.int32), np.array([-0.5], np.float32))
    before = (b"%d" % (number - 1),) if number else ()
    return sample(f"turn{number}", tokens=tokens, exchange=b"%d" % number, extends=before, task_id="t")


def erase(connection: Connection) -> None:
    transitions.erase(connection, task_id="t")


def remove(connection: Connection) -> None:
    transitions.remove(connection, connection.execute(select(experiences.c.id)).scalars().all())


def erase_first(connection: Connection) -> None:
    transitions.erase(connection, msg_id="turn0")


def remove_first(connection: Connection) -> None:
    first = select(experiences.c.id).where(experiences.c.msg_id == "turn0")
    transitions.remove(connection, connection.execute(first).scalars().all())


def run(ledger: Ledger, work: Callable[[Connection], object], failures: list[BaseException]) -> threading.Thread:
    def write() -> None:
        try:
            with ledger.write() as connection:
                work(connection)
        except Exception as error:  # noqa: BLE001 — the test looks at it
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("delete", [erase, remove, erase_first, remove_first])
@pytest.mark.parametrize("turns", [1, 2])
def test_both_are_done_whichever_waits_for_the_other(turns, delete, ledger):
    with ledger.write() as connection:
        for number in range(turns):
            transitions.record(connection, [turn(number)])
        connection.execute(update(experiences).values(state=State.DISCARDED))
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []
    seen: list[str] = []

    def delete_in_between(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        """The deletion begins after the record's first lock on tokens, and reaches a lock of the record."""
        if "FOR SHARE" in "".join(seen) and len(threads) == 1:
            threads.append(run(ledger, delete, failures))
            wait_for_lock(ledger)
        seen.append(statement)

    def record(connection: Connection) -> None:
        event.listen(connection, "before_cursor_execute", delete_in_between)
        transitions.record(connection, [turn(turns)])

    threads.append(run(ledger, record, failures))
    threads[0].join(240)
    threads[1].join(240)
    assert not failures
    left = turns if delete in (erase_first, remove_first) else 1
    with ledger.read() as connection:
        assert connection.execute(select(func.count()).select_from(payloads)).scalar() == left
