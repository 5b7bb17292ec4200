"""Whose gradient it is: from what keys say of the ledger's rows to the weights of each algorithm's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.config import RewardConfig, TrainerConfig
from shared.experience import Tokens
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal
from shared.stop_request import StopRequest
from tests.support.batches import precomputed
from tests.support.samples import sample
from tests.unit.test_hints import PLAIN, TOKENIZER, ids
from trainer_service.algorithms.registry import algorithm as algorithm_of
from trainer_service.algorithms.seam import Batch
from trainer_service.answers import AnswerTokenizer
from trainer_service.batch import make_batch
from trainer_service.broadcast import pack_rows, unpack_rows
from trainer_service.claim import Claimer
from trainer_service.hints import HintWriter
from trainer_service.shares import bound_shares, keys_of

FREE = {"kl_coef": 0.0, "outlier_bound": None}
MIX: dict[str, Any] = {
    "algorithms": {"reinforce_pp": 1.0, "raft": 1.0, "kto": 1.0, "dpo": 1.0, "sft": 1.0, "hint": 1.0},
    "reinforce_pp": FREE,
    "hint": {**PLAIN, "top_k": 0, "least_effect": 0.0, "neutral_reward": None},
}
ANSWERS = AnswerTokenizer(TOKENIZER, vocabulary=300, longest=None)
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
UP, DOWN = Signal("rating", text="up"), Signal("rating", text="down")


def record(ledger: Ledger, name: str, reply: str = "yes", prompt: str = PROMPT, **about: Any) -> None:
    found = Tokens(ids(prompt), ids(reply), -np.ones(len(ids(reply)), np.float32))
    with ledger.write() as connection:
        transitions.record(connection, [sample(name, tokens=found, **about)])


def say(ledger: Ledger, name: str, key: str | None, *signals: Signal, **about: Any) -> None:
    learned = TrainerConfig.model_validate(MIX).learns_from
    asked: dict[str, Any] = {"task_id": None, "run_id": None, "rule": RewardConfig(), "learned": learned, **about}
    with ledger.write() as connection:
        transitions.apply_feedback(connection, msg_ids=[name], signals=signals, key_name=key, **asked)


def batch_of(ledger: Ledger, **trainer: Any) -> Batch:
    """What the trainer makes of all that is ready, as it comes to another rank."""
    with ledger.write() as connection:
        transitions.commit(connection)
    config = TrainerConfig.model_validate({**MIX, "batch_size": 1, "batch_timeout_s": 0.01, **trainer})
    lease = Claimer(ledger, config, StopRequest(), answers=ANSWERS).next()
    assert lease is not None
    rows = HintWriter(TOKENIZER, config.hint, None).write(lease.rows)
    return make_batch(unpack_rows(pack_rows(rows)))


def weights(batch: Batch, name: str, at_most: float) -> dict[str | None, float]:
    """What each key's members weigh in the loss of an algorithm, in the order of the keys' first; the mean of each."""
    config = TrainerConfig.model_validate(MIX)
    algorithm = algorithm_of(name, config)
    units = algorithm.units(batch)
    teacher = [np.full(len(unit.words[0].actions), -0.5, np.float32) for unit in units if unit.words]
    constants, _ = algorithm.constants(batch, units, precomputed(batch, teacher=teacher), {})
    keys = keys_of(batch, units)
    bounded, _ = bound_shares(constants, keys, at_most)
    found: dict[str | None, list[float]] = {}
    for number, key in keys.items():
        found.setdefault(key, []).append(float(bounded["weights"][number].mean()))
    return {key: float(np.mean(ofs)) for key, ofs in found.items()}


def test_comments_are_their_own_key_s_whoever_rated_the_rows(ledger):
    """Four comments of one key, one of another, all on rows that others rated: half of the gradient each."""
    for number in range(5):
        record(ledger, f"m{number}")
        say(ledger, f"m{number}", f"rater{number}", UP if number else DOWN)
        say(ledger, f"m{number}", "loud" if number < 4 else "calm", Signal("comment", text="shorter"))
    batch = batch_of(ledger, batch_size=5)
    assert weights(batch, "hint", 1.0) == {"loud": 1, "calm": 1}
    assert weights(batch, "hint", 0.5) == pytest.approx({"loud": 1 / 4, "calm": 1})
    assert (
        list(weights(batch, "kto", 0.5))
        == list(weights(batch, "reinforce_pp", 0.5))
        == [f"rater{number}" for number in range(5)]
    )


def test_ratings_corrections_and_preferences_are_bounded_by_who_said_them(ledger):
    for number in range(4):
        key = "loud" if number < 3 else "calm"
        record(ledger, f"m{number}")
        record(ledger, f"other{number}", "no!")
        say(ledger, f"m{number}", key, DOWN)
        say(ledger, f"m{number}", key, Signal("preferred_over", text=f"other{number}"))
        record(ledger, f"c{number}", "not")
        say(ledger, f"c{number}", key, Signal("correction", text="two" if number else "six"))
    batch = batch_of(ledger, batch_size=8)
    assert weights(batch, "sft", 0.5) == pytest.approx({"loud": 1 / 3, "calm": 1})
    assert weights(batch, "kto", 0.5) == pytest.approx({"loud": 1 / 3, "calm": 1})
    assert weights(batch, "dpo", 0.5) == pytest.approx({"loud": 1 / 3, "calm": 1})
    assert weights(batch, "hint", 0.5) == pytest.approx({"loud": 1 / 3, "calm": 1}), "the corrections"


def test_of_several_keys_on_one_row_the_last_that_counts_is_taken(ledger):
    record(ledger, "first", run_id="r", task_id="t")
    record(ledger, "second", prompt=f"{PROMPT}more", run_id="r", task_id="t")
    record(ledger, "other", "no!")
    say(ledger, "first", "ann", Signal("correction", text="two"), Signal("comment", text="long"))
    say(ledger, "first", "bob", Signal("comment", text="short"))
    say(ledger, "first", "eve", Signal("comment", text="  "))
    say(ledger, "first", "ann", Signal("preferred_over", text="other"))
    say(ledger, "first", "bob", Signal("preferred_over", text="other#0"))
    say(ledger, "second", "cem", UP, Signal("correction", text="whole"))
    say(ledger, "second", "ann", DOWN)
    whole = Signal("correction", text="of the last reply alone", scope="run")
    with ledger.write() as connection:
        asked: dict[str, Any] = {"msg_ids": [], "task_id": "t", "run_id": "r", "rule": RewardConfig()}
        learned = TrainerConfig.model_validate(MIX).learns_from
        transitions.apply_feedback(connection, signals=[whole], key_name="dan", learned=learned, **asked)
    batch = batch_of(ledger, batch_size=2)
    assert list(weights(batch, "sft", 1.0)) == ["ann", "dan"], "first row: that of the message; last row: the newest"
    assert list(weights(batch, "dpo", 1.0)) == ["bob", "ann", "dan"]
    assert list(weights(batch, "hint", 1.0)) == ["dan"], "he spoke of the whole last"
    assert list(weights(batch, "kto", 1.0)) == ["ann"]
    assert set(batch.scored_by.values()) == {"ann"}


def test_a_next_message_is_said_by_the_key_that_chatted(ledger):
    record(ledger, "first", key_name="app", exchange=b"1")
    continued = f"{PROMPT}yes<|im_end|>\n<|im_start|>user\nno!<|im_end|>\n<|im_start|>assistant\n"
    record(ledger, "second", "oh", continued, key_name="desk", exchange=b"2", extends=(b"1",))
    say(ledger, "second", "ann", UP)
    batch = batch_of(ledger, batch_size=1)
    assert [words.key for about in batch.words.values() for words in about] == ["desk"]


def test_what_is_rehearsed_stays_its_key_s(ledger):
    for name, key in (("a", "ann"), ("b", None)):
        record(ledger, name)
        say(ledger, name, key, Signal("correction", text="two"), Signal("comment", text="short"))
    batch = batch_of(ledger, batch_size=2)
    assert len(batch.written) == 2
    with ledger.write() as connection:
        about: dict[str, Any] = {"version": 1, "parent": None, "kind": "full", "step": 1, "trainer": "trainer"}
        transitions.publish(connection, **about, batch_ids=[1])
    record(ledger, "new")
    say(ledger, "new", "bob", Signal("comment", text="short"))
    batch = batch_of(ledger, rehearse=4, hint={**MIX["hint"], "top_k": 4})  # with 0, only answers are rehearsed
    assert len(batch.rehearsed) == 4
    assert set(weights(batch, "sft", 1.0)) == {"ann", None}
    assert set(weights(batch, "hint", 1.0)) == {"bob", "ann", None}
