"""Rows that were spoken of and trained on are added to later batches: `hint` learns from their words again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.config import RewardConfig, TrainerConfig
from shared.experience import Experience
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.stop_request import StopRequest
from tests.support.samples import sample
from trainer_service.batch import make_batch
from trainer_service.claim import Claimer

SAID = [Signal("reward", value=0.25), Signal("comment", text="shorter")]
MIX: dict[str, float] = {"reinforce_pp": 1.0, "hint": 1.0}
BLOCK = np.array([7, 8], np.int32)


@pytest.fixture
def ledger(ledger):
    """A ledger in which were trained on: six commented rows, one corrected as a whole, one of a demonstration and one
    of a rating. Four commented ones are new."""
    say(ledger, {f"said-{number}": SAID for number in range(6)}, key_name="ann")
    say(ledger, {"whole": [Signal("correction", text="yes")]}, scope="conversation")
    say(ledger, {"shown": [Signal("demonstration")], "rated": [Signal("rating", text="up")]})
    with ledger.write() as connection:
        batch = transitions.claim(connection, owner="trainer", at_least=9, at_most=9, lease_s=60)
        about: dict[str, Any] = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[batch])
    say(ledger, {f"new-{number}": SAID for number in range(4)})
    return ledger


def say(ledger: Ledger, said: dict[str, list[Signal]], **about: Any) -> None:
    every = config({**MIX, "sft": 1.0}).learns_from
    about |= {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": every}
    with ledger.write() as connection:
        transitions.record(connection, [sample(name) for name in said])
        for name, signals in said.items():
            transitions.apply_feedback(connection, msg_ids=[name], signals=signals, **about)
        transitions.commit(connection)


def config(algorithms: dict[str, float], **more: Any) -> TrainerConfig:
    about = {"algorithms": algorithms, "batch_size": 4, "poll_interval_s": 0.02, **more}
    return TrainerConfig.model_validate(about)


def claimed(ledger: Ledger, algorithms: dict[str, float] = MIX, **more: Any) -> list[Experience]:
    with ledger.write() as connection:
        transitions.give_back(connection, owner="trainer")
    lease = Claimer(ledger, config(algorithms, **more), StopRequest()).next()
    assert lease is not None
    return lease.rows


def again(rows: list[Experience]) -> list[Experience]:
    return [row for row in rows if row.is_rehearsal]


def test_rows_with_words_are_drawn_for_hint_with_the_words_and_no_reward(ledger):
    drawn = again(claimed(ledger, rehearse=4))
    assert {row.msg_id for row in drawn} == {f"said-{number}" for number in range(6)}
    assert {tuple(one.kind for one in row.signals) for row in drawn} == {("comment",)}
    assert {(row.own_reward, row.outcome, row.reward) for row in drawn} == {(None, None, 0.25)}


def test_each_algorithm_gets_what_it_learns_again_and_the_same_batch_the_same_rows(ledger):
    assert {row.msg_id for row in again(claimed(ledger, {"reinforce_pp": 1.0, "sft": 1.0}, rehearse=4))} == {"shown"}
    both = {row.msg_id for row in again(claimed(ledger, {**MIX, "sft": 1.0}, rehearse=4))}
    assert both == {"shown", *(f"said-{number}" for number in range(6))}
    draws = [[row.msg_id for row in claimed(ledger, rehearse=0.5, seed=seed)] for seed in (0, 0, 1, 2, 3)]
    assert draws[0] == draws[1] and len(draws[0]) in (5, 6) and any(draw != draws[0] for draw in draws[2:])


def test_they_are_sequences_of_their_own_with_words_in_no_trajectory_and_not_counted_as_new(ledger):
    rows = [replace(row, hint=BLOCK, hint_key=row.signals[-1].key_name) for row in claimed(ledger, rehearse=1)]
    batch = make_batch(rows)
    drawn = again(rows)
    sampled = [place for places in batch.members for place in places]
    assert len(sampled) == 4 and list(batch.rehearsed) == sorted(set(batch.words) - set(sampled))
    assert [batch.sequences[place].row_ids for place in batch.rehearsed] == [[row.id] for row in drawn]
    assert not batch.written and len(batch.rewards) == 4
    for place in batch.rehearsed:
        (words,) = batch.words[place]
        assert (words.token_ids.tolist(), words.actions.tolist(), words.reward) == ([7, 8], [0], 0.25)
        assert batch.sequences[place].behaviour.tolist() == [-0.5] and words.key == "ann"


def test_words_that_have_not_acted_yet_are_not_rehearsed(ledger):
    """A comment acts once it is committed, and once: rehearsal repeats only what was trained on."""
    about = {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": config(MIX).learns_from}
    later = [Signal("comment", text="LONGER")]
    with ledger.write() as connection:
        transitions.apply_feedback(connection, msg_ids=["said-0"], signals=later, key_name="ann", **about)
    found = {row.msg_id: row for row in claimed(ledger, rehearse=4.0) if row.is_rehearsal}
    assert [signal.text for signal in found["said-0"].signals] == ["shorter"]
