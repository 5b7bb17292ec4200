"""A reward acts on the turns that led to it, not on other answers to the same messages."""

from __future__ import annotations

import pytest

from shared.ledger.connect import Ledger
from shared.reward import Signal
from tests.support.lessons import RUN, record, say, stands, train

UP = Signal("rating", text="up")


@pytest.mark.parametrize("first", [0, 1])
def test_a_rating_of_another_choice_acts_whichever_was_rated_first(ledger, first):
    record(ledger, "m", choice=0, **RUN)
    record(ledger, "m", choice=1, **RUN)
    assert say(ledger, f"m#{first}", UP) == "applied"
    train(ledger, 1)
    assert say(ledger, f"m#{1 - first}", UP) == "applied"
    assert len(train(ledger, 2)) == 1


def link(ledger: Ledger, *turns: tuple[str, bytes, tuple[bytes, ...]]) -> None:
    for name, exchange, extends in turns:
        record(ledger, name, exchange=exchange, extends=extends, **RUN)


def test_another_try_of_a_turn_keeps_its_own_rating_and_the_turns_before_it_have_that_of_either(ledger):
    link(ledger, ("a", b"1" * 8, ()), ("b", b"2" * 8, (b"1" * 8,)), ("c", b"3" * 8, (b"1" * 8,)))
    assert stands(ledger, "msg_id", "parent_id") == [("a", None), ("b", "a"), ("c", "a")]
    say(ledger, "c", UP)
    train(ledger, 1)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 1, "b": 0, "c": 1}
    assert say(ledger, "b", UP) == "applied"
    assert set(train(ledger, 2)) == {"b"}


def test_turns_that_no_messages_link_lead_to_later_ones_of_their_run(ledger):
    record(ledger, "a", **RUN)
    link(ledger, ("b", b"2" * 8, ()), ("c", b"3" * 8, (b"2" * 8,)))
    say(ledger, "c", UP)
    train(ledger, 1)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 1, "b": 1, "c": 1}


def test_another_try_of_a_first_turn_keeps_its_own_rating(ledger):
    """Nothing links two answers to the same first messages, but their prompts are equal."""
    record(ledger, "a", "b", prompt="the same", **RUN)
    record(ledger, "other", **RUN)
    say(ledger, "b", UP)
    train(ledger, 1)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 0, "b": 1, "other": 0}
    assert say(ledger, "a", UP) == "applied"
    train(ledger, 2)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 1, "b": 1, "other": 0}


def test_another_try_keeps_its_own_rating_when_the_turn_that_was_chosen_is_continued_later(ledger):
    """The turn between was trained on before, so it is not in the batch."""
    link(ledger, ("a", b"1" * 8, ()), ("b", b"2" * 8, (b"1" * 8,)), ("c", b"3" * 8, (b"1" * 8,)))
    say(ledger, "c", UP)
    train(ledger, 1)
    link(ledger, ("d", b"4" * 8, (b"3" * 8,)))
    say(ledger, "d", UP)
    train(ledger, 2)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 1, "b": 0, "c": 1, "d": 1}
    assert say(ledger, "b", UP) == "applied"


def test_another_try_of_a_first_turn_keeps_its_own_rating_when_the_chosen_one_is_continued_later(ledger):
    record(ledger, "a", prompt="the same", exchange=b"1" * 8, **RUN)
    record(ledger, "b", prompt="the same", exchange=b"2" * 8, **RUN)
    say(ledger, "b", UP)
    train(ledger, 1)
    link(ledger, ("c", b"3" * 8, (b"2" * 8,)))
    say(ledger, "c", UP)
    train(ledger, 2)
    assert dict(stands(ledger, "msg_id", "taught")) == {"a": 0, "b": 1, "c": 1}
