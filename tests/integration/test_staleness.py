"""How far a row may be behind the newest version: numbers of versions that are not in use do not count."""

from __future__ import annotations

from sqlalchemy import select

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from tests.support.lessons import UP, commit, record, say

AT_MOST_BEHIND = 4


def do(ledger: Ledger, name: str, *args, **kwargs):
    with ledger.write() as connection:
        return getattr(transitions, name)(connection, *args, **kwargs)


def publish_versions(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        about = {"parent": None, "kind": "full", "step": number}
        do(ledger, "publish", version=number, trainer="t" if number else None, **about)
        do(ledger, "serve_version", number, by="an engine")


def make_ready(ledger: Ledger, *sampled_by: int) -> None:
    """One rewarded row of each of these versions, named after it."""
    for version in sampled_by:
        record(ledger, f"by {version}", version=version)
        say(ledger, f"by {version}", UP)
    commit(ledger)


def claim(ledger: Ledger, at_most: int = 99) -> int | None:
    about = {"owner": "t", "at_least": 1, "at_most": at_most, "lease_s": 60}
    return do(ledger, "claim", **about, at_most_behind=AT_MOST_BEHIND)


def in_state(ledger: Ledger, state: str) -> list[str]:
    query = select(experiences.c.msg_id).where(experiences.c.state == state).order_by(experiences.c.id)
    return ledger.fetch(lambda connection: list(connection.execute(query).scalars()))


def discard_stale(ledger: Ledger) -> list[str]:
    count = do(ledger, "discard_stale", at_most_behind=AT_MOST_BEHIND)
    discarded = in_state(ledger, "DISCARDED")
    assert count == len(discarded)
    return discarded


def test_a_row_is_stale_if_more_later_versions_exist_than_are_allowed(ledger):
    publish_versions(ledger, *range(8))
    make_ready(ledger, 2, 3, 7)
    assert claim(ledger) is not None
    assert in_state(ledger, "LEASED") == ["by 3", "by 7"]
    assert discard_stale(ledger) == ["by 2"]


def test_after_a_rollback_rows_of_the_version_gone_back_to_are_not_stale(ledger):
    publish_versions(ledger, *range(13))
    do(ledger, "roll_back", 2, by="an operator")
    make_ready(ledger, 2, 1, 0)
    publish_versions(ledger, 13, 14, 15)
    assert discard_stale(ledger) == ["by 0"]
    assert claim(ledger) is not None
    assert in_state(ledger, "LEASED") == ["by 2", "by 1"]


def test_rows_that_an_operator_wants_to_be_trained_on_again_are_not_stale_for_the_versions_that_were_rejected(ledger):
    publish_versions(ledger, 0)
    make_ready(ledger, *range(12))
    for version in range(1, 13):
        batch = claim(ledger, 1)
        about = {"parent": version - 1, "kind": "full", "step": version, "trainer": "t"}
        do(ledger, "publish", version=version, **about, batch_ids=[batch])
        do(ledger, "serve_version", version, by="an engine")
    assert do(ledger, "roll_back", 2, again=True, by="an operator").rows == 10
    publish_versions(ledger, 13)
    assert discard_stale(ledger) == []


def test_numbers_that_are_only_reserved_or_that_a_trainer_has_withdrawn_make_no_row_stale(ledger):
    publish_versions(ledger, *range(12))
    do(ledger, "withdraw_versions", writer="t", after=4)
    for writer in ("t", "another", "a third"):
        do(ledger, "reserve_version", writer=writer)
    make_ready(ledger, 0, 1)
    assert discard_stale(ledger) == []
    publish_versions(ledger, 15)
    assert discard_stale(ledger) == ["by 0"]


def test_versions_without_files_count_and_without_versions_nothing_is_stale(ledger):
    make_ready(ledger, 0)
    assert claim(ledger) is not None
    do(ledger, "give_back", owner="t")
    publish_versions(ledger, *range(6))
    about = {"owner": "a janitor", "max_versions": 1, "max_bytes": 1e12, "sizes": {}, "by": "t"}
    assert do(ledger, "give_up_files", **about)
    assert discard_stale(ledger) == ["by 0"]
