"""What services do all day reads what is there to do, and not what was done before: it costs the same on an old ledger.

SQLite counts the steps of a statement, so no clock is needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from sqlalchemy import Connection, Engine, event, func, select, text, update

from shared.config import RewardConfig
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.reward import Signal
from tests.support.experiences import record_ready, rows
from tests.support.plans import plans_of
from tests.support.processes import run_here
from tests.support.samples import sample

TASKS, RUNS, PAST = 8, 4, 2000
CLAIM = {"owner": "trainer", "at_least": 1, "at_most": 64, "lease_s": 60.0}
KEEP = {"owner": "trainer-0", "max_versions": 3, "max_bytes": 1e9, "sizes": {}, "by": "trainer"}
_NUMBERS = "WITH RECURSIVE past (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM past WHERE n < :past)"
_PAST = (
    f"INSERT INTO versions (version, kind, path, state, step, created_at, served_at, deleted_at) {_NUMBERS}"
    " SELECT n, 'full', 'versions/v' || n, 'RETIRED', n, n, n, n FROM past",
    f"INSERT INTO batches (owner, state, lease_until, consumed_version, created_at) {_NUMBERS}"
    " SELECT 'trainer', 'CONSUMED', 0, n, n FROM past",
    "INSERT INTO experiences (msg_id, choice, task_id, run_id, version, version_end, state, reward, taught, batch_id,"
    f" consumed_version, n_prompt, n_reply, temperature, top_p, top_k, min_p, created_at) {_NUMBERS}"
    f" SELECT 'p' || n, 0, 't' || (n % {TASKS}), 'p' || n, n, n, 'CONSUMED', 1, 1, n, n, 2, 1, 1, 1, 0, 0, n FROM past",
)
WORK: dict[str, Callable[[Connection], object]] = {
    "claim": lambda c: transitions.claim(c, **CLAIM),
    "claim of tasks": lambda c: transitions.claim(c, **CLAIM, whole="task", runs_of_task=RUNS, wait_s=600.0),
    "commit": transitions.commit,
    "discard": lambda c: transitions.discard_stale(c, at_most_behind=0),
    "serve": lambda c: transitions.serve_version(c, PAST + 1, by="an engine"),
    "give up files": lambda c: transitions.give_up_files(c, **KEEP),
    "metrics": queries.progress,
    "poll": queries.wanted_versions,
    "promote": lambda c: transitions.share_traffic(c, {PAST + 1: 1.0}, at_most=1, by="an operator"),
    "poll after a promotion": lambda c: (WORK["promote"](c), queries.wanted_versions(c)),
}


@pytest.fixture
def aging(tmp_path) -> Iterator[Ledger]:
    """Runs of tasks that wait for a trainer, and a version that waits for engines."""
    opened = Ledger.open(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    names = [(f"m{task}-{run}", f"t{task}", f"r{run}") for task in range(TASKS) for run in range(RUNS)]
    with opened.write() as connection:
        transitions.record(connection, [sample(name, task_id=task, run_id=run) for name, task, run in names])
        given = {"task_id": None, "run_id": None, "signals": [Signal("reward", value=1.0)], "rule": RewardConfig()}
        transitions.apply_feedback(connection, msg_ids=[name for name, _, _ in names], **given)
        transitions.commit(connection)
        transitions.announce_trainer(
            connection, name="trainer", step=PAST, version=PAST + 1, state_path=None, state_sha256=None, chosen=None
        )
        for version in (0, PAST + 1):
            transitions.publish(connection, version=version, parent=0, kind="full", step=version)
    yield opened
    opened.close()


def _grow_old(ledger: Ledger) -> None:
    """Add the rows that were trained on, each by a version whose files are deleted."""
    with ledger.write() as connection:
        for statement in _PAST:
            connection.execute(text(statement), {"past": PAST})


def _steps(ledger: Ledger, work: Callable[[Connection], object]) -> int:
    """Return the number of steps of SQLite's machine in a transaction, which is rolled back."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    with pytest.raises(StopIteration), ledger.write() as connection:
        connection.connection.driver_connection.set_progress_handler(count, 1)
        try:
            work(connection)
        finally:
            connection.connection.driver_connection.set_progress_handler(None, 1)
        raise StopIteration
    return steps


@pytest.mark.parametrize("name", WORK)
def test_daily_work_reads_nothing_of_the_past(aging, name):
    young = _steps(aging, WORK[name])
    _grow_old(aging)
    assert young > 0 and _steps(aging, WORK[name]) < 2 * young


def test_an_expiry_reads_no_rows_that_are_too_young(aging):
    def expire(connection: Connection) -> None:
        assert transitions.expire(connection, before=1.0) == 0

    steps = []
    for count in (1, PAST):
        with aging.write() as connection:
            transitions.record(connection, [sample(f"young-{count}-{number}") for number in range(count)])
        steps.append(_steps(aging, expire))
    assert steps[1] < 2 * steps[0]


def test_the_status_reads_no_row_for_each_old_version(aging):
    _grow_old(aging)
    read = 0

    def count(_cursor: object, row: tuple[object, ...]) -> tuple[object, ...]:
        nonlocal read
        read += 1
        return row

    with aging.read() as connection:
        connection.connection.driver_connection.row_factory = count
        status = queries.ledger_status(connection)
        connection.connection.driver_connection.row_factory = None
    of_versions = {"newest": PAST + 1, "serving": None, "published": PAST + 1, "reloads": PAST, "shares": {}}
    assert status["versions"] == of_versions
    assert read < PAST


def test_the_pace_is_read_from_the_newest_versions_and_batches(aging):
    plans = "\n".join(plan for _, plan in plans_of(aging, lambda connection: queries.pace(connection, now=PAST)))
    assert not re.search(r"SCAN (versions|batches|experiences USING COVERING INDEX ix_experiences_batch)", plans), plans


def test_no_transaction_of_an_archive_removes_more_than_a_thousand_rows(ledger, config, tmp_path):
    """Writers wait for each, and SQLite's log is as large as the largest."""
    record_ready(ledger, rows(1100))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(state="CONSUMED", teaches=0))
    left = [1100]

    def count(connection: Connection) -> None:
        left.append(connection.execute(select(func.count()).select_from(experiences)).scalar_one())

    event.listen(Engine, "commit", count)
    try:
        run_here(config, "archive", "--to", str(tmp_path / "archive"), "--older-than-days", "0")
    finally:
        event.remove(Engine, "commit", count)
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) <= 1000


def test_a_row_from_the_future_keeps_no_later_row_from_expiring(ledger):
    """Its clock was ahead, or an import gave its time in milliseconds."""
    with ledger.write() as connection:
        transitions.record(connection, [replace(sample("future"), created_at=1.7e12)])
        transitions.record(connection, [replace(sample("old"), created_at=1.0)])
        assert transitions.expire(connection, before=time.time() - 3600) == 1
