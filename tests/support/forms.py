"""The two forms of slow tests: CI runs the short form; FLYWHEEL_TORTURE=full selects the long one."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

FULL = os.environ.get("FLYWHEEL_TORTURE") == "full"
DATABASES = ("sqlite", "postgresql")

one_database = pytest.mark.one_database
"""For tests whose subject is not the database: the short form runs each of them on one of both, the long one on both.

`pytestmark = one_database` says it of a file, `@one_database` of a test; what uses the fixture `database_url` of
tests/conftest.py is halved. In the order of the file, tests take SQLite and PostgreSQL in turn, and so do the cases of
one test: nothing else decides which database it is. The names stay, for example `test_x[postgresql]`; in the short form
the other one is not found. A file that sets `database_url` itself has the databases that it says. A test whose subject
is SQL, locks, races or time in the database does not have this mark.
"""

_cases_before = pytest.StashKey[int]()  # of a file or a class: cases that have the mark


def on_one_database(collector: pytest.Collector, items: Sequence[object]) -> list[object]:
    """Of the items of one function, those that this form runs."""
    of_database = {name: [item for item in items if _database_of(item) == name] for name in DATABASES}
    cases = len(of_database[DATABASES[0]])
    if FULL or any(len(same) != cases for same in of_database.values()):  # some choose their database themselves
        return list(items)
    before = collector.stash.get(_cases_before, 0)
    collector.stash[_cases_before] = before + cases
    # on each database the cases come in the same order
    dropped = {
        same[case]
        for number, same in enumerate(of_database.values())
        for case in range(cases)
        if (before + case) % len(DATABASES) != number
    }
    return [item for item in items if item not in dropped]


def _database_of(item: object) -> str | None:
    """The database of an item that has the mark."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("one_database") and hasattr(item, "callspec"):
        found: str | None = item.callspec.params.get("database_url")
        return found
    return None
