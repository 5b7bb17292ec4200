"""A score that was refused because a row had been leased or trained on acts if the row is trained on after all."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, update

from shared.config import RewardConfig
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import batches, signals
from shared.reward import Lesson, Signal
from tests.integration.test_lessons_after_failures import publish_base
from tests.support.lessons import COMMENT, LEARNED, RUN, UP, claim, commit, record, say, stands, train

RULE = RewardConfig()
DOWN = Signal("rating", text="down")


def give_back(ledger: Ledger) -> None:
    with ledger.write() as connection:
        assert transitions.give_back(connection, owner="t", rule=RULE) >= 1


def expire(ledger: Ledger) -> None:
    with ledger.write() as connection:
        connection.execute(update(batches).values(lease_until=0))
        assert transitions.give_back(connection, rule=RULE) >= 1


def fail(ledger: Ledger) -> None:
    with ledger.write() as connection:
        held = select(func.max(batches.c.id)).scalar_subquery()
        batch_id = connection.execute(select(batches.c.id).where(batches.c.id == held)).scalar_one()
        assert transitions.fail_update(connection, batch_id, "no number", rule=RULE) == 0


RETURNS = pytest.mark.parametrize("end", [give_back, expire, fail])


@RETURNS
def test_a_score_that_a_lease_refused_is_the_reward_after_its_return(ledger, end):
    record(ledger, "m")
    assert say(ledger, "m", UP, key_name="ann") == "applied"
    commit(ledger)
    claim(ledger)
    assert say(ledger, "m", DOWN, key_name="bob") == "already_trained"
    assert stands(ledger, "reward", "feedback_key") == [(1.0, "ann")], "as it may be trained on now"
    end(ledger)
    assert stands(ledger, "reward", "turn_reward", "feedback_key") == [(0.0, 0.0, "bob")]
    assert say(ledger, "m", DOWN, key_name="bob") == "duplicate"
    assert train(ledger, 1) == {"m": (Lesson.REWARD, 0.0, ["rating", "rating"])}


@RETURNS
def test_a_score_of_a_turn_that_was_leased_for_a_later_one_is_its_own_after_the_return(ledger, end):
    record(ledger, "a", "b", **RUN)
    say(ledger, "b", UP)
    commit(ledger)
    claim(ledger)
    assert say(ledger, "a", DOWN) == "already_trained"
    end(ledger)
    assert stands(ledger, "reward", "teaches") == [(0.0, Lesson.REWARD), (1.0, Lesson.REWARD)]
    assert train(ledger, 1) == {"a": (Lesson.REWARD, 0.0, ["rating"]), "b": (Lesson.REWARD, 1.0, ["rating"])}


@pytest.mark.parametrize("commented", [False, True])
def test_a_score_after_training_is_the_reward_if_the_version_is_rolled_back_to_train_again(ledger, commented):
    publish_base(ledger)
    record(ledger, "m")
    say(ledger, "m", UP)
    train(ledger, 1)
    assert say(ledger, "m", DOWN) == "already_trained"
    if commented:
        say(ledger, "m", COMMENT)
        assert train(ledger, 2) == {"m": (Lesson.COMMENT, None, ["comment"])}
    with ledger.write() as connection:
        assert transitions.roll_back(connection, 0, again=True, by="operator", rule=RULE).rows == 1
    said = ["rating", "rating", "comment"] if commented else ["rating", "rating"]
    lessons = Lesson.REWARD | Lesson.COMMENT if commented else Lesson.REWARD
    assert train(ledger, 3) == {"m": (lessons, 0.0, said)}


@RETURNS
def test_a_reward_that_was_trained_on_stays_though_a_later_lease_is_returned(ledger, end):
    record(ledger, "m")
    say(ledger, "m", UP)
    train(ledger, 1)
    say(ledger, "m", COMMENT)
    commit(ledger)
    claim(ledger)
    assert say(ledger, "m", DOWN) == "already_trained"
    end(ledger)
    assert stands(ledger, "reward", "teaches") == [(1.0, Lesson.COMMENT)]


def test_a_metric_without_a_weight_that_a_lease_refused_changes_nothing(ledger):
    record(ledger, "a", "b", **RUN)
    say(ledger, "b", UP, key_name="ann")
    commit(ledger)
    claim(ledger)
    for name in ("a", "b"):
        say(ledger, name, Signal("metric", name="latency", value=3.0), key_name="monitor")
    give_back(ledger)
    assert stands(ledger, "reward", "teaches", "feedback_key") == [(None, 0, "ann"), (1.0, Lesson.REWARD, "ann")]


def test_a_lease_that_is_loaded_later_has_the_scores_that_it_was_claimed_with(ledger):
    """The answer to a claim was lost; the batch is loaded when the trainer finds it."""
    record(ledger, "m")
    say(ledger, "m", UP)
    commit(ledger)
    lease = claim(ledger)
    assert say(ledger, "m", DOWN) == "already_trained"
    with ledger.read() as connection:
        (row,) = queries.load_lease(connection, lease.batch_id, kinds=LEARNED).rows
        assert connection.execute(select(func.count()).select_from(signals)).scalar() == 2
    assert (row.own_reward, list(row.signals)) == (1.0, [UP])


@RETURNS
def test_a_score_about_a_row_that_was_erased_while_it_was_leased_changes_nothing(ledger, end):
    record(ledger, "m")
    say(ledger, "m", UP)
    commit(ledger)
    claim(ledger)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="m")
    assert say(ledger, "m", DOWN) == "already_trained"
    end(ledger)
    assert stands(ledger, "reward", "teaches") == [(1.0, 0)]
