"""On SQLite no transaction of the loop reads the whole table of samples: each finds its rows by an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection

from shared.config import RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from tests.support.plans import plans_of
from tests.support.samples import sample

SAID = {"signals": [Signal("reward", value=1.0), Signal("comment", text="no")], "rule": RewardConfig()}
CLAIM = {"owner": "trainer", "at_least": 1, "at_most": 4, "lease_s": 60.0}
VERSION = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
WORK: dict[str, Callable[[Connection], object]] = {
    "feedback": lambda c: transitions.apply_feedback(c, msg_ids=["m3"], task_id=None, run_id=None, **SAID),
    "feedback for a run": lambda c: transitions.apply_feedback(c, msg_ids=[], task_id="t1", run_id="r3", **SAID),
    "feedback for a task": lambda c: transitions.apply_feedback(c, msg_ids=[], task_id="t2", run_id=None, **SAID),
    "commit": transitions.commit,
    "commit of a task": lambda c: transitions.commit(c, task_id="t1"),
    "commit of a run": lambda c: transitions.commit(c, task_id="t1", run_id="r3"),
    "commit of a group": lambda c: transitions.commit(c, key_group="g"),
    "commit of what is old": lambda c: transitions.commit(c, before=1e12),
    "expire": lambda c: transitions.expire(c, before=1e12),
    "claim": lambda c: transitions.claim(c, **CLAIM),
    "claim of tasks": lambda c: transitions.claim(c, **CLAIM, whole="task"),
    "publish": lambda c: transitions.publish(c, **VERSION, batch_ids=[transitions.claim(c, **CLAIM)]),
    "discard": lambda c: transitions.discard_stale(c, at_most_behind=1),
    "erase": lambda c: transitions.erase(c, msg_id="m3"),
    "erase of a task": lambda c: transitions.erase(c, task_id="t1"),
}


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    """Single chats and runs, some of them rewarded and ready."""
    opened = Ledger.open(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
    samples = [sample(f"m{n}", task_id=f"t{n // 4}", run_id=f"r{n // 2}") for n in range(20)]
    with opened.write() as connection:
        transitions.record(connection, [*samples, *(sample(f"n{n}") for n in range(20))])
        for name in ("m8", "m13", "n1", "n2"):
            transitions.apply_feedback(connection, msg_ids=[name], task_id=None, run_id=None, **SAID)
        transitions.commit(connection)
        transitions.apply_feedback(connection, msg_ids=["m6", "n5"], task_id=None, run_id=None, **SAID)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", WORK)
def test_each_transaction_finds_its_rows_by_an_index(ledger, name):
    plans = plans_of(ledger, WORK[name])
    assert plans
    for statement, plan in plans:
        for line in plan.splitlines():
            reads_all = line.startswith("SCAN experiences") and "USING" not in line
            assert not reads_all and "experiences USING INTEGER PRIMARY KEY (rowid>?)" not in line, (statement, plan)
