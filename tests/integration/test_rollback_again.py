"""`rollback --again`: which rows are trained on again, and with what, also those that a trainer holds meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete

from shared.config import RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import lineage
from shared.reward import Lesson, Signal
from tests.integration.test_lessons_after_failures import publish_base
from tests.support.lessons import COMMENT, UP, claim, commit, publish, record, say, stands, train

RULE = RewardConfig()
DOWN = Signal("rating", text="down")


@pytest.fixture
def based(ledger) -> Ledger:
    """Version 0, and the rows m and n, of which m has been trained on for its rating in version 1."""
    publish_base(ledger)
    record(ledger, "m", "n")
    say(ledger, "m", UP)
    train_and_serve(ledger, 1)
    return ledger


def serve(ledger: Ledger, version: int) -> None:
    with ledger.write() as connection:
        assert transitions.serve_version(connection, version, by="an engine")


def train_and_serve(ledger: Ledger, version: int) -> None:
    assert train(ledger, version)
    serve(ledger, version)


def roll_back(ledger: Ledger, to: int, again: bool = True) -> int:
    with ledger.write() as connection:
        return transitions.roll_back(connection, to, again=again, by="operator", rule=RULE).rows


def give_back(ledger: Ledger) -> None:
    with ledger.write() as connection:
        assert transitions.give_back(connection, owner="t", rule=RULE) == 1


@pytest.mark.parametrize("has_lineage", [True, False])
def test_a_row_whose_first_version_was_rejected_before_is_trained_on_with_all_that_was_said(based, has_lineage):
    roll_back(based, 0, again=False)
    say(based, "n", UP)
    train_and_serve(based, 2)
    say(based, "m", COMMENT)
    train_and_serve(based, 3)
    if not has_lineage:  # as of a trainer of an older Flywheel: the row names version 1
        with based.write() as connection:
            connection.execute(delete(lineage).where(lineage.c.version == 1))
    assert roll_back(based, 2) == 1
    assert train(based, 4) == {"m": (Lesson.REWARD | Lesson.COMMENT, 1.0, ["rating", "comment"])}


def test_a_row_that_only_an_earlier_rollback_concerned_stays_as_it_is(based):
    roll_back(based, 0, again=False)
    say(based, "n", UP)
    train_and_serve(based, 2)
    assert roll_back(based, 2) == 0
    assert stands(based, "state", "taught", "consumed_version") == [("CONSUMED", Lesson.REWARD, v) for v in (1, 2)]


def test_a_repeat_names_the_rows_of_a_rollback_without_again_once(based):
    roll_back(based, 0, again=False)
    assert [roll_back(based, 0), roll_back(based, 0)] == [1, 0]


def test_a_row_in_weights_that_the_version_descends_from_stays_though_an_engine_rejected_that_version(based):
    about: dict[str, Any] = {"kind": "full", "step": 2, "trainer": "t"}
    with based.write() as connection:
        transitions.reject_version(connection, 1, "its folder is damaged", by="an engine")
        transitions.publish(connection, version=2, parent=1, **about)
    serve(based, 2)
    say(based, "m", COMMENT)
    train_and_serve(based, 3)
    assert roll_back(based, 2) == 0
    assert train(based, 4) == {}


def test_what_a_leased_row_was_trained_on_before_acts_once_its_trainer_returns_it(based):
    say(based, "m", COMMENT)
    commit(based)
    assert claim(based) is not None
    assert say(based, "m", DOWN) == "already_trained"
    assert roll_back(based, 0) == 1
    assert stands(based, "state", "taught", "consumed_version", "batch_id")[0] == ("LEASED", 0, None, 2)
    give_back(based)
    assert train(based, 2) == {"m": (Lesson.REWARD | Lesson.COMMENT, 0.0, ["rating", "comment", "rating"])}


def test_a_leased_row_has_the_last_score_whenever_it_came(based):
    say(based, "m", COMMENT)
    commit(based)
    claim(based)
    roll_back(based, 0)
    assert say(based, "m", DOWN) == "updated"
    give_back(based)
    assert stands(based, "reward")[0] == (0.0,)


def test_a_score_that_the_present_lease_refuses_counts_once_it_is_returned(based):
    """Trained on a comment, and leased for a rating."""
    say(based, "n", COMMENT)
    train_and_serve(based, 2)
    say(based, "n", UP)
    commit(based)
    claim(based)
    assert say(based, "n", DOWN) == "already_trained"
    assert roll_back(based, 1) == 1
    assert stands(based, "reward")[1] == (1.0,), "as it may be trained on now"
    give_back(based)
    assert train(based, 3) == {"n": (Lesson.REWARD | Lesson.COMMENT, 0.0, ["comment", "rating", "rating"])}


def test_a_trainer_that_is_not_rolled_back_trains_a_leased_row_for_the_rest_later(based):
    say(based, "m", COMMENT)
    commit(based)
    lease = claim(based)
    roll_back(based, 0)
    publish(based, lease, 2)
    assert stands(based, "state", "taught", "teaches")[0] == ("CONSUMED", Lesson.COMMENT, Lesson.REWARD)
    assert train(based, 3) == {"m": (Lesson.REWARD, 1.0, ["rating"])}


def test_an_erased_row_that_is_leased_stays_erased(based):
    say(based, "m", COMMENT)
    commit(based)
    claim(based)
    with based.write() as connection:
        transitions.erase(connection, msg_id="m")
    assert roll_back(based, 0) == 0
