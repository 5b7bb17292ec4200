"""Runs of a task are claimed together where rewards are compared, and nothing else waits for them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import update

from shared.config import RewardConfig, TrainerConfig
from shared.ledger import queries, transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from shared.reward import SCORES, Signal
from tests.integration.test_credit import commit, lease, say, stored
from tests.support.samples import sample
from trainer_service.claim import group_wait


def test_a_task_waits_for_its_runs_until_nothing_was_said_of_them_for_a_while(explorer):
    for task, run in (("alone", 1), ("both", 1), ("both", 2), ("both", 2)):
        explorer.chat(metadata={"task_id": task, "run_id": run})
    explorer.chat()
    for task in ("alone", "both"):
        say(explorer, task_id=task, reward=1)
    say(explorer, msg_ids=[stored(explorer, "msg_id")[-1]], reward=1)
    commit(explorer)
    whole = {"whole": "task", "runs_of_task": 2}
    assert [row.task_id for row in lease(explorer, **whole).rows] == ["both"] * 3 + [None]
    assert lease(explorer, **whole, wait_s=3600.0).rows == []
    assert [row.task_id for row in lease(explorer, **whole, wait_s=0.0).rows] == ["alone"]


def test_a_run_of_which_no_reward_was_said_waits_for_no_others_of_its_task_and_is_none_of_their_group(explorer):
    """Comments and corrections teach by themselves; rewards are compared with those of other runs."""
    ledger = explorer.ledger
    said = {"corrected": "correction", "rewarded": "reward", "compared": "reward"}
    turns_of = {("a", "corrected"): 2, ("a", "rewarded"): 2}
    turns_of |= {("b", "rewarded"): 1, ("b", "compared"): 1, ("b", "corrected"): 1}
    with ledger.write() as connection:
        for (task, run), turns in turns_of.items():
            names = [f"{task}-{run}-{turn}" for turn in range(turns)]
            transitions.record(connection, [sample(name, task_id=task, run_id=run) for name in names])
            signal = Signal("correction", text="w3") if said[run] == "correction" else Signal("reward", value=1.0)
            given = {"rule": RewardConfig(), "learned": SCORES | {"correction"}, "task_id": None, "run_id": None}
            transitions.apply_feedback(connection, msg_ids=names[-1:], signals=[signal], **given)
        transitions.commit(connection)

    def claimed(runs_of_task: int) -> list[str]:
        asked = {"whole": "task", "runs_of_task": runs_of_task, "wait_s": None}
        with ledger.write() as connection:
            batch = transitions.claim(connection, owner="t", at_least=1, at_most=64, lease_s=60, **asked)
            return [] if batch is None else [row.msg_id for row in queries.load_lease(connection, batch).rows]

    assert claimed(3) == ["a-corrected-0", "a-corrected-1", "b-corrected-0"]
    assert claimed(2) == ["b-rewarded-0", "b-compared-0"]
    assert claimed(1) == ["a-rewarded-0", "a-rewarded-1"]


def record_runs(ledger: Ledger, turns: Iterable[tuple[str, int]]) -> None:
    """Turns of runs of one task, in this order; the message with each turn 1 gets a reward of its own."""
    with ledger.write() as connection:
        transitions.record(connection, [sample(f"{run}{turn}", task_id="t", run_id=run) for run, turn in turns])
        given = {"rule": RewardConfig(), "task_id": None, "run_id": None}
        said = {"msg_ids": [f"{run}1" for run, turn in turns if turn == 1], "signals": [Signal("reward", value=1.0)]}
        transitions.apply_feedback(connection, **said, **given)
        transitions.commit(connection)


def claimed_by(ledger: Ledger, **about: int) -> list[str]:
    asked = {"owner": "t", "at_least": 1, "at_most": 64, "lease_s": 60, "whole": "task", **about}
    with ledger.write() as connection:
        batch = transitions.claim(connection, **asked)
        return [] if batch is None else [row.msg_id for row in queries.load_lease(connection, batch).rows]


def test_a_task_of_more_rows_than_are_claimed_together_is_claimed_in_whole_runs(explorer):
    """Its runs go on at once: a cut through all of them would leave the first turns without the rewards they led to."""
    record_runs(explorer.ledger, [(run, turn) for turn in range(2) for run in "abc"])
    assert [claimed_by(explorer.ledger, group_rows=4) for _ in range(3)] == [["a0", "b0", "a1", "b1"], ["c0", "c1"], []]


def test_a_run_of_a_task_that_is_longer_than_what_is_claimed_together_is_claimed_in_parts(explorer):
    record_runs(explorer.ledger, [("a", 0), ("a", 1), *(("b", turn) for turn in range(5)), ("c", 0), ("c", 1)])
    parts = [claimed_by(explorer.ledger, group_rows=3) for _ in range(4)]
    assert parts == [["a0", "a1"], ["b0", "b1", "b2"], ["b3", "b4"], ["c0", "c1"]]


def test_rows_of_a_task_before_the_place_of_the_search_are_its_first_run(explorer):
    record_runs(explorer.ledger, [(run, turn) for run in "ab" for turn in range(2)])
    assert claimed_by(explorer.ledger, group_rows=2, after_id=2) == ["a0", "a1"]


def test_conversations_of_a_task_without_runs_are_its_runs(explorer):
    ledger = explorer.ledger
    turns = [(conversation, turn) for turn in range(2) for conversation in "ab"]
    with ledger.write() as connection:
        transitions.record(connection, [sample(f"{name}{turn}", task_id="t") for name, turn in turns])
        for name in "ab":
            mine = experiences.c.msg_id.in_([f"{name}0", f"{name}1"])
            connection.execute(update(experiences).where(mine).values(conversation_id=name))
        given = {"rule": RewardConfig(), "task_id": None, "run_id": None, "signals": [Signal("reward", value=1.0)]}
        transitions.apply_feedback(connection, msg_ids=["a1", "b1"], **given)
        transitions.commit(connection)
    assert [claimed_by(ledger, group_rows=3) for _ in range(2)] == [["a0", "a1"], ["b0", "b1"]]


def test_choices_of_a_message_without_a_task_are_claimed_together_where_rewards_are_compared(explorer):
    ledger = explorer.ledger
    with ledger.write() as connection:
        for name in ("m", "other"):
            transitions.record(connection, [sample(name, choice=choice) for choice in range(3)])
            names = [f"{name}#{choice}" for choice in range(3)]
            for one in names[: 2 if name == "m" else 3]:
                given = {"rule": RewardConfig(), "task_id": None, "run_id": None, "msg_ids": [one]}
                transitions.apply_feedback(connection, signals=[Signal("reward", value=1.0)], **given)
        transitions.commit(connection)

    def claimed(whole: transitions.Whole) -> list[tuple[str, int]]:
        with ledger.write() as connection:
            transitions.give_back(connection, owner="t")
            batch = transitions.claim(connection, owner="t", at_least=1, at_most=3, lease_s=60, whole=whole)
            return [(row.msg_id, row.choice) for row in queries.load_lease(connection, batch).rows]

    assert claimed("task") == [("m", 0), ("m", 1), ("other", 0), ("other", 1), ("other", 2)]
    assert claimed("trajectory") == [("m", 0), ("m", 1), ("other", 0)], "a failing row can stand alone"


def test_choices_of_a_message_of_a_task_without_runs_are_runs_of_it(explorer):
    with explorer.ledger.write() as connection:
        transitions.record(connection, [sample("m", choice=choice, task_id="t") for choice in range(3)])
        for choice in range(3):
            given = {"rule": RewardConfig(), "task_id": None, "run_id": None, "msg_ids": [f"m#{choice}"]}
            transitions.apply_feedback(connection, signals=[Signal("reward", value=1.0)], **given)
        transitions.commit(connection)
        assert queries.tasks_repeat(connection)
    with explorer.ledger.write() as connection:
        limits = {"owner": "t", "at_least": 1, "at_most": 3, "lease_s": 60, "wait_s": None}
        batch = transitions.claim(connection, **limits, whole="task", runs_of_task=3)
        assert batch is not None
        assert len(queries.load_lease(connection, batch).rows) == 3


def test_the_turns_of_a_conversation_are_one_attempt_at_its_task(explorer):
    with explorer.ledger.write() as connection:
        transitions.record(connection, [sample(f"a{turn}", task_id="t") for turn in range(3)])
        connection.execute(update(experiences).values(conversation_id="a0"))
        assert not queries.tasks_repeat(connection)
        transitions.record(connection, [sample("b0", task_id="t")])
        assert queries.tasks_repeat(connection)


def test_a_claimer_waits_as_long_as_the_most_patient_of_its_algorithms():
    said = {"grpo": {"group_size": 4, "group_timeout_s": 9}, "rloo": {"group_timeout_s": 5}}
    used = TrainerConfig.model_validate({"algorithms": {"grpo": 1, "rloo": 1, "ppo": 1}, **said})
    assert group_wait(used) == {"runs_of_task": 4, "wait_s": 9}
    for_ever = TrainerConfig.model_validate({"algorithm": "rloo", "rloo": {"group_timeout_s": None}})
    assert group_wait(for_ever) == {"runs_of_task": 2, "wait_s": None}
    assert group_wait(TrainerConfig()) == {}
