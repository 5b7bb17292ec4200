"""What is said of a row acts once, whenever it is said: a comment after a rating, a reward after a comment."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from shared.config import TrainerConfig
from shared.experience import Experience
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.reward import Lesson, Signal
from shared.stop_request import StopRequest
from tests.support.lessons import COMMENT, LEARNED, RUN, UP, claim, commit, publish, record, say, stands, train
from tests.support.plans import plans_of
from trainer_service.algorithms.registry import algorithm
from trainer_service.algorithms.seam import Batch
from trainer_service.claim import Claimer
from trainer_service.trajectories import trajectories_of


def test_a_comment_after_its_rating_was_trained_acts_alone_and_once(ledger):
    record(ledger, "m")
    assert say(ledger, "m", UP) == "applied"
    assert train(ledger, 1) == {"m": (Lesson.REWARD, 1.0, ["rating"])}
    assert [say(ledger, "m", COMMENT) for _ in range(2)] == ["applied", "duplicate"]
    assert stands(ledger, "state", "consumed_version", "reward") == [("CONSUMED", 1, 1.0)]
    assert commit(ledger) == 1 and stands(ledger, "state") == [("READY",)]
    assert train(ledger, 2) == {"m": (Lesson.COMMENT, None, ["comment"])}
    assert stands(ledger, "state", "consumed_version", "reward") == [("CONSUMED", 1, 1.0)], (
        "the first version that contains it"
    )
    assert [say(ledger, "m", signal) for signal in (COMMENT, UP, Signal("reward", value=0.0))] == [
        "already_trained"
    ] * 3
    assert train(ledger, 3) == {}


def test_a_reward_after_a_comment_was_trained_acts_alone_and_once(ledger):
    record(ledger, "m")
    say(ledger, "m", COMMENT)
    assert train(ledger, 1) == {"m": (Lesson.COMMENT, None, ["comment"])}
    assert say(ledger, "m", Signal("reward", value=0.25)) == "applied"
    assert say(ledger, "m", Signal("reward", value=0.5)) == "updated"
    assert train(ledger, 2) == {"m": (Lesson.REWARD, 0.5, ["reward", "reward"])}
    assert say(ledger, "m", UP) == "already_trained"


def test_each_comment_acts_once_however_late_and_a_repeat_never(ledger):
    record(ledger, "m")
    say(ledger, "m", COMMENT)
    assert train(ledger, 1) == {"m": (Lesson.COMMENT, None, ["comment"])}
    assert say(ledger, "m", Signal("comment", text="too rude")) == "applied"
    assert texts(ledger, 2) == ["too rude"]
    assert say(ledger, "m", COMMENT) == "already_trained", "it acted, and was said before the other one"
    assert train(ledger, 3) == {}
    assert say(ledger, "m", UP) == "applied"
    assert train(ledger, 3) == {"m": (Lesson.REWARD, 1.0, ["rating"])}
    assert say(ledger, "m", Signal("comment", text="and too late")) == "applied"
    assert texts(ledger, 4) == ["and too late"]


def test_a_second_comment_while_a_trainer_holds_the_row_for_the_first_acts_afterwards(ledger):
    record(ledger, "m", "n")
    say(ledger, "m", COMMENT)
    say(ledger, "n", COMMENT)
    commit(ledger)
    lease = claim(ledger)
    assert say(ledger, "m", Signal("comment", text="too rude")) == "applied"
    publish(ledger, lease, 1)
    assert stands(ledger, "teaches") == [(Lesson.COMMENT,), (0,)]
    assert texts(ledger, 2) == ["too rude"]
    assert train(ledger, 3) == {}


def test_a_comment_that_is_repeated_while_a_trainer_holds_the_row_for_it_acts_once(ledger):
    record(ledger, "m")
    say(ledger, "m", COMMENT)
    commit(ledger)
    lease = claim(ledger)
    assert say(ledger, "m", COMMENT) == "already_trained"
    publish(ledger, lease, 1)
    assert stands(ledger, "teaches") == [(0,)]
    assert train(ledger, 2) == {}


def test_a_reward_that_comes_too_late_for_a_lease_does_not_act_beside_a_comment(ledger):
    record(ledger, "m", "n", **RUN)
    say(ledger, "n", UP)
    commit(ledger)
    lease = claim(ledger)
    assert say(ledger, "m", UP) == "already_trained"
    assert say(ledger, "m", COMMENT) == "applied"
    assert stands(ledger, "teaches") == [(Lesson.COMMENT,), (Lesson.REWARD,)]
    publish(ledger, lease, 1)
    assert stands(ledger, "teaches", "taught") == [(Lesson.COMMENT, Lesson.REWARD), (0, Lesson.REWARD)]


def test_two_comments_act_together_where_a_lease_was_given_back_between_them(ledger):
    record(ledger, "m")
    say(ledger, "m", COMMENT)
    commit(ledger)
    claim(ledger)
    say(ledger, "m", Signal("comment", text="too rude"))
    with ledger.write() as connection:
        transitions.give_back(connection, owner="t")
    assert texts(ledger, 1) == ["too long", "too rude"]
    assert train(ledger, 2) == {}


def test_a_next_message_acts_once_though_both_rows_are_ready_again(ledger):
    for name, parent in (("m", None), ("n", "m")):
        record(ledger, name, **RUN)
        with ledger.write() as connection:
            mine = update(experiences).where(experiences.c.msg_id == name)
            connection.execute(mine.values(parent_id=parent, conversation_id="m"))
    say(ledger, "n", UP)
    assert [(row.msg_id, bool(row.acts & Lesson.NEXT_MESSAGE)) for row in leased(ledger, 1)] == [
        ("m", True), ("n", False)
    ]  # fmt: skip
    say(ledger, "m", COMMENT)
    say(ledger, "n", COMMENT)
    assert [(row.msg_id, row.acts) for row in leased(ledger, 2)] == [("m", Lesson.COMMENT), ("n", Lesson.COMMENT)]


def test_a_next_message_that_nobody_learns_from_does_not_act(ledger):
    record(ledger, "m", "n")
    with ledger.write() as connection:
        connection.execute(update(experiences).where(experiences.c.msg_id == "n").values(parent_id="m"))
    say(ledger, "m", UP)
    say(ledger, "n", UP)
    assert [row.acts for row in leased(ledger, 1, next_messages=False)] == [Lesson.REWARD, Lesson.REWARD]


def leased(ledger: Ledger, version: int, *, next_messages: bool = True) -> list[Experience]:
    """Commit, claim and publish: the rows."""
    commit(ledger)
    about: dict[str, Any] = {"owner": "t", "at_least": 1, "at_most": 9, "lease_s": 60, "next_messages": next_messages}
    with ledger.write() as connection:
        lease = queries.load_lease(connection, transitions.claim(connection, **about), kinds=LEARNED)
    publish(ledger, lease, version)
    return lease.rows


def texts(ledger: Ledger, version: int) -> list[str | None]:
    """Commit, claim and publish the only row: the texts that act."""
    commit(ledger)
    lease = claim(ledger)
    assert lease is not None
    publish(ledger, lease, version)
    (row,) = lease.rows
    return [signal.text for signal in row.signals]


def test_what_nobody_learns_from_readies_no_row_again(ledger):
    record(ledger, "m")
    say(ledger, "m", UP)
    train(ledger, 1)
    assert say(ledger, "m", Signal("preferred_over", text="n")) == "already_trained"
    assert commit(ledger) == 0


def test_a_late_reward_of_a_run_brings_all_of_it_and_of_a_turn_its_whole_trajectory(ledger):
    record(ledger, "a", "b", "c", **RUN)
    say(ledger, "b", COMMENT)
    nothing = (0, None, [])
    assert train(ledger, 1) == {"a": nothing, "b": (Lesson.COMMENT, None, ["comment"]), "c": nothing}
    say(ledger, "c", Signal("reward", value=1.0))
    late = train(ledger, 2)
    assert {name: acts for name, (acts, _, _) in late.items()} == dict.fromkeys("abc", Lesson.REWARD)
    assert say(ledger, "a", Signal("reward", value=1.0)) == "already_trained", "its trajectory's reward acted on it"
    assert say(ledger, "c", COMMENT) == "applied"
    assert list(train(ledger, 3)) == ["c"], "a comment is about its own row"


def test_a_turn_after_the_one_that_was_rated_waits_for_a_rating_of_its_own_or_of_the_whole(ledger):
    record(ledger, "a", "b", "c", "d", **RUN)
    say(ledger, "b", UP)
    first, nothing = train(ledger, 1), (0, None, [])
    assert first == {"a": (Lesson.REWARD, None, []), "b": (Lesson.REWARD, 1.0, ["rating"]), "c": nothing, "d": nothing}
    assert [say(ledger, name, Signal("rating", text="down")) for name in "ac"] == ["already_trained", "applied"]
    assert train(ledger, 2) == {"c": (Lesson.REWARD, 0.0, ["rating"]), "d": nothing}
    say(ledger, "d", UP, scope="run")
    assert train(ledger, 3) == {"d": (Lesson.REWARD, None, ["rating"])}


def test_a_comment_while_a_trainer_holds_the_row_for_its_rating_acts_afterwards(ledger):
    record(ledger, "m")
    say(ledger, "m", UP)
    commit(ledger)
    lease = claim(ledger)
    assert [say(ledger, "m", signal) for signal in (COMMENT, Signal("reward", value=0.0))] == [
        "applied", "already_trained"
    ]  # fmt: skip
    publish(ledger, lease, 1)
    assert train(ledger, 2) == {"m": (Lesson.COMMENT, None, ["comment"])}
    assert stands(ledger, "reward") == [(1.0,)]


def test_a_lease_that_is_given_back_lets_both_act_together(ledger):
    record(ledger, "m")
    say(ledger, "m", UP)
    commit(ledger)
    claim(ledger)
    say(ledger, "m", COMMENT)
    with ledger.write() as connection:
        transitions.give_back(connection, owner="t")
    assert train(ledger, 1) == {"m": (Lesson.REWARD | Lesson.COMMENT, 1.0, ["rating", "comment"])}


def test_a_row_that_waits_for_its_late_comment_is_neither_removed_nor_expired(ledger):
    record(ledger, "m", "n", **RUN)
    say(ledger, "m", UP)
    train(ledger, 1)
    record(ledger, "late", **RUN)
    say(ledger, "m", COMMENT)
    with ledger.write() as connection:
        ids = list(connection.execute(select(experiences.c.id)).scalars())
        assert transitions.expire(connection, before=1e12) == 0, "its commit would make the other turn ready"
        assert transitions.remove(connection, ids) == [2], "only the row that nothing is open for"
    assert set(train(ledger, 2)) == {"m", "late"}


def test_a_late_comment_on_a_row_that_is_too_old_leaves_it_trained(ledger):
    record(ledger, "m", "never")
    say(ledger, "m", UP)
    train(ledger, 1)
    for version in (2, 3):
        record(ledger, f"m{version}")
        say(ledger, f"m{version}", UP)
        train(ledger, version)
    say(ledger, "m", COMMENT)
    say(ledger, "never", COMMENT)
    commit(ledger)
    with ledger.write() as connection:
        assert transitions.discard_stale(connection, at_most_behind=1) == 2
    assert stands(ledger, "msg_id", "state")[:2] == [("m", "CONSUMED"), ("never", "DISCARDED")]
    assert commit(ledger) == 0


def test_nothing_more_can_be_said_of_an_erased_row(ledger):
    record(ledger, "m")
    say(ledger, "m", UP)
    train(ledger, 1)
    say(ledger, "m", COMMENT)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="m")
    assert say(ledger, "m", Signal("correction", text="no")) == "already_trained"
    assert commit(ledger) == 0


def test_rows_that_wait_for_a_commit_are_found_by_an_index(ledger):
    record(ledger, "m")
    say(ledger, "m", UP)
    for scope in ({}, {"key_group": "g"}, {"before": 1e12}):
        plans = plans_of(ledger, lambda connection, scope=scope: transitions.commit(connection, **scope))
        assert "ix_experiences_teaching" in plans[0][1], plans[0]


def test_a_part_of_a_commit_is_bounded(ledger):
    record(ledger, *(f"m{number}" for number in range(1200)))
    with ledger.write() as connection:
        connection.execute(update(experiences).values(reward=1.0, teaches=Lesson.REWARD))
    with ledger.write() as connection:
        count, last_id = transitions.commit_part(connection)
    assert count == last_id == 500


def test_rows_that_were_rewarded_before_do_not_earn_what_is_new_in_their_run(ledger):
    """The last turn is rewarded now, and the first one is back for its comment alone."""
    record(ledger, "m", **RUN)
    say(ledger, "m", UP)
    train(ledger, 1)
    record(ledger, "n", **RUN)
    say(ledger, "n", Signal("reward", value=0.5))
    say(ledger, "m", COMMENT)
    commit(ledger)
    lease = claim(ledger)
    batch = Batch.of(trajectories_of(lease.rows))
    (unit,) = algorithm("reinforce_pp", TrainerConfig(algorithm="reinforce_pp")).units(batch)
    rewarded = batch.sequences[unit.members[0]]
    assert [row.msg_id for row in lease.rows if row.id in rewarded.row_ids] == ["n"]
    assert [trajectory.outcome for trajectory in batch.trajectories] == [None, None]


def test_a_claimer_brings_the_signals_that_act(ledger):
    record(ledger, "m")
    say(ledger, "m", UP, Signal("correction", text="yes"))
    commit(ledger)
    config = TrainerConfig.model_validate({"algorithms": {"reinforce_pp": 1, "sft": 1}, "batch_size": 1})
    (row,) = Claimer(ledger, config, StopRequest()).next().rows
    assert (row.acts, [signal.kind for signal in row.signals]) == (
        Lesson.REWARD | Lesson.CORRECTION, ["rating", "correction"]
    )  # fmt: skip
