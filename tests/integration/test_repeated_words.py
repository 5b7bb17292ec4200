"""Words that are said again change nothing, whether anything learns from them or not."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from shared.config import RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import signals
from shared.reward import SCORES, Signal
from tests.support.lessons import record


@pytest.fixture
def ledger(ledger):
    record(ledger, "a", "b", "c")
    return ledger


def say(ledger: Ledger, *said: Signal, learned=SCORES, key: str | None = None) -> str:
    about = {"msg_ids": ["a"], "task_id": None, "run_id": None, "rule": RewardConfig(), "key_name": key}
    with ledger.write() as connection:
        return transitions.apply_feedback(connection, **about, signals=said, learned=learned)[0].state


def logged(ledger: Ledger) -> int:
    with ledger.read() as connection:
        return connection.execute(select(func.count()).select_from(signals)).scalar()


@pytest.mark.parametrize("kind", ["comment", "correction", "preferred_over"])
@pytest.mark.parametrize("learns", [False, True])
def test_a_repeat_is_a_duplicate_of_a_row_that_was_never_trained(ledger, kind, learns):
    learned = SCORES | {kind} if learns else SCORES
    said = [say(ledger, Signal(kind, text="b"), learned=learned) for _ in range(3)]
    assert (said, logged(ledger)) == (["applied", "duplicate", "duplicate"], 1)


@pytest.mark.parametrize("kind", ["comment", "correction", "preferred_over"])
def test_the_same_words_of_another_key_are_no_repeat(ledger, kind):
    said = [say(ledger, Signal(kind, text="b"), learned=SCORES | {kind}, key=key) for key in "abab"]
    assert (said, logged(ledger)) == (["applied", "applied", "duplicate", "duplicate"], 2)


def test_the_same_reward_of_another_key_is_a_repeat(ledger):
    said = [say(ledger, Signal("reward", value=1.0), key=key) for key in "ab"]
    assert (said, logged(ledger)) == (["applied", "duplicate"], 1)


@pytest.mark.parametrize("learns", [False, True])
def test_a_repeat_of_several_preferences_is_a_duplicate_and_another_one_is_not(ledger, learns):
    learned = SCORES | {"preferred_over"} if learns else SCORES
    both = [Signal("preferred_over", text=other) for other in ("b", "c")]
    assert [say(ledger, *both, learned=learned) for _ in range(3)] == ["applied", "duplicate", "duplicate"]
    assert say(ledger, both[0], learned=learned) == "duplicate"
    assert say(ledger, Signal("preferred_over", text="d"), learned=learned) == "applied"
    assert logged(ledger) == 3
