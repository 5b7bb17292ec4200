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


def say(ledger: Ledger, *said: Signal, learned=SCORES) -> str:
    about = {"msg_ids": ["a"], "task_id": None, "run_id": None, "rule": RewardConfig()}
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


@pytest.mark.parametrize("learns", [False, True])
def test_a_repeat_of_several_preferences_is_a_duplicate_and_another_one_is_not(ledger, learns):
    learned = SCORES | {"preferred_over"} if learns else SCORES
    both = [Signal("preferred_over", text=other) for other in ("b", "c")]
    assert [say(ledger, *both, learned=learned) for _ in range(3)] == ["applied", "duplicate", "duplicate"]
    assert say(ledger, both[0], learned=learned) == "duplicate"
    assert say(ledger, Signal("preferred_over", text="d"), learned=learned) == "applied"
    assert logged(ledger) == 3
