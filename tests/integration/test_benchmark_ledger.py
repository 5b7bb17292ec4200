"""The rows that benchmarks/ledger stores are like those of an explorer: no two have the same exchange."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from sqlalchemy import func, select

from benchmarks.ledger import record, snapshot, transaction
from benchmarks.ledger.databases import WRITERS, Databases
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences


class OneDatabase(Databases):
    """The database of a test in place of new ones."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, kind: str) -> str:
        return self._url


def _rows_and_exchanges(ledger: Ledger) -> tuple[int, int]:
    with ledger.read() as connection:
        rows, exchanges = connection.execute(select(func.count(), func.count(experiences.c.exchange.distinct()))).one()
    return rows, exchanges


def test_each_row_of_the_measured_recorder_has_an_exchange_of_its_own(ledger):
    asyncio.run(record._write_with_64(ledger, 0.2))
    rows, exchanges = _rows_and_exchanges(ledger)
    assert rows == exchanges >= WRITERS


def test_the_driver_alone_stores_rows_like_the_transaction_beside_it(ledger, config, monkeypatch):
    monkeypatch.setattr(transaction, "_WARM", 2)
    transaction.measure(OneDatabase(config.ledger_url), "any", chats=3)
    rows, exchanges = _rows_and_exchanges(ledger)
    assert rows == exchanges == 1 + 2 * 5


class FakeLearner:
    """Claims nothing, while a clock goes on by 0.01 s."""

    now = 0.0

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.spent, self.claims = ledger, 0.0, 0

    def learn(self) -> None:
        self.spent, self.claims = self.spent + 0.01, self.claims + 1
        FakeLearner.now += 0.01


def test_a_snapshot_is_held_for_about_the_stated_time(postgres, monkeypatch):
    monkeypatch.setattr(snapshot, "Learner", FakeLearner)
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(perf_counter=lambda: FakeLearner.now))
    url = postgres.new_ledger()
    figures = snapshot.measure(OneDatabase(url), 6.0)
    postgres.drop(url)
    assert 6.0 <= round(figures["held_s"], 3) <= 6.0 + 6 * 0.02  # each of the six parts ends with a whole turn
