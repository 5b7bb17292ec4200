"""Whether two urls name one database."""

from __future__ import annotations

import pytest

from services.commands.migrate import names_same_database


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgresql://u:p@db/ledger", "postgres://v@db:5432/ledger?sslmode=require", True),
        ("postgresql+psycopg://u@DB.lan/ledger", "postgresql://u@db.lan/ledger", True),
        ("postgresql://u@127.0.0.1/ledger", "postgresql://u@[::1]/ledger", True),
        ("postgresql://u@/ledger?host=/run/pg", "postgresql:///ledger?host=/run/pg&port=5432", True),
        ("postgresql://ledger@db", "postgresql://u@db/ledger", True),
        ("postgresql://u@db/ledger", "postgresql://u@db/other", False),
        ("postgresql://u@db/ledger", "postgresql://u@db:5433/ledger", False),
        ("postgresql://u@db/ledger", "postgresql://u@db2/ledger", False),
        ("postgresql://u@db/ledger", "sqlite:///ledger", False),
        ("sqlite:///a.sqlite3", "sqlite:///./a.sqlite3", True),
        ("sqlite:///a.sqlite3", "sqlite:///b.sqlite3", False),
    ],
)
def test_two_urls_of_one_database_are_recognized(one, other, same):
    assert names_same_database(one, other) is same
