"""Failed updates with a row count until a saved state contains an update with it, not against its next lesson."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import LeaseLost
from shared.experience import Lease
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries.lease import DEATHS_TOLERATED
from tests.support.lessons import COMMENT, UP, claim, commit, publish, record, say, stands


def claimed(ledger: Ledger, at_most: int = 9) -> Lease:
    lease = claim(ledger, at_most)
    assert lease is not None
    return lease


def fail(ledger: Ledger, lease: Lease) -> int:
    """Return the number of quarantined rows."""
    with ledger.write() as connection:
        quarantined = transitions.fail_update(connection, lease.batch_id, "no memory at that moment")
        transitions.give_back(connection, owner="t")
        return quarantined


def die(ledger: Ledger, lease: Lease) -> None:
    with ledger.write() as connection:
        transitions.mark_updating(connection, lease.batch_id, updating=True)
        transitions.give_back(connection, owner="t")


def make_ready(ledger: Ledger, *names: str) -> None:
    record(ledger, *names)
    for name in names:
        say(ledger, name, UP)
    commit(ledger)


def make_ready_again(ledger: Ledger, name: str) -> None:
    say(ledger, name, COMMENT)
    assert commit(ledger) == 1


def publish_base(ledger: Ledger) -> None:
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.serve_version(connection, 0, by="an engine")


def test_failures_before_a_row_was_trained_do_not_count_against_its_next_lesson(ledger):
    make_ready(ledger, "m")
    assert fail(ledger, claimed(ledger)) == 0
    publish(ledger, claimed(ledger), 1)
    make_ready_again(ledger, "m")
    with ledger.read() as connection:
        assert queries.failures_of_oldest(connection) == 0, "claims are not smaller because of it"
    assert fail(ledger, claimed(ledger)) == 0, "this lesson failed for the first time"
    assert stands(ledger, "state", "failures") == [("READY", 1)]
    assert fail(ledger, claimed(ledger)) == 1


def test_deaths_before_a_row_was_trained_do_not_count_against_its_next_lesson(ledger):
    make_ready(ledger, "m")
    for _ in range(DEATHS_TOLERATED):
        die(ledger, claimed(ledger))
    publish(ledger, claimed(ledger), 1)
    make_ready_again(ledger, "m")
    for deaths in range(1, DEATHS_TOLERATED + 1):
        die(ledger, claimed(ledger))
        assert stands(ledger, "state", "failures", "deaths") == [("READY", 0, deaths)]


def test_rows_keep_their_failures_until_a_saved_state_contains_them(ledger):
    publish_base(ledger)
    make_ready(ledger, "m", "n")
    fail(ledger, claimed(ledger, at_most=1))
    first = publish_ahead(ledger, 1, at_most=1)
    assert stands(ledger, "state", "failures") == [("LEASED", 1), ("READY", 0)]
    second = claimed(ledger)
    with pytest.raises(LeaseLost):
        record_state(ledger, {1: [first], 2: [second.batch_id, 1000]})
    assert stands(ledger, "state", "failures") == [("LEASED", 1), ("LEASED", 0)]
    fail(ledger, second)
    assert stands(ledger, "state", "failures") == [("READY", 1), ("READY", 1)], "both are trained on again"
    held = {2: [publish_ahead(ledger, 2, at_most=1)]}
    other = claimed(ledger)
    record_state(ledger, held)
    assert stands(ledger, "state", "failures") == [("CONSUMED", 0), ("LEASED", 1)], "the state has one of them"
    assert fail(ledger, other) == 1


def publish_ahead(ledger: Ledger, version: int, at_most: int) -> int:
    """Publish a version that no state contains. Returns the id of its batch."""
    batch_id = claimed(ledger, at_most).batch_id
    with ledger.write() as connection:
        assert transitions.reserve_version(connection, writer="t") == version
        about: dict[str, Any] = {"parent": 0, "kind": "full", "step": version, "trainer": "t"}
        transitions.publish_ahead(connection, version=version, **about)
    return batch_id


def record_state(ledger: Ledger, contained: dict[int, list[int]]) -> None:
    with ledger.write() as connection:
        state: dict[str, Any] = {"state_path": "s", "state_sha256": None}
        transitions.record_state(connection, trainer="t", version=2, step=2, contained=contained, **state)


def test_after_a_rollback_only_what_failed_since_a_row_was_trained_counts(ledger):
    publish_base(ledger)
    make_ready(ledger, "m", "n")
    fail(ledger, claimed(ledger))
    publish(ledger, claimed(ledger), 1)
    make_ready_again(ledger, "n")
    fail(ledger, claimed(ledger))
    with ledger.write() as connection:
        assert transitions.roll_back(connection, 0, again=True, by="operator").rows == 2
    assert stands(ledger, "msg_id", "state", "failures") == [("m", "READY", 0), ("n", "READY", 1)]
