"""Cycles of preferences whose rows are not all in one batch. On both databases."""

from __future__ import annotations

from dataclasses import replace

from shared.ledger import transitions
from shared.ledger.queries import preferences
from tests.integration.test_said import leased, record, say, tokens
from tests.support.samples import sample
from trainer_service.batch import make_batch


def test_a_circle_through_two_choices_of_a_message_is_found(ledger):
    with ledger.write() as connection:
        both = [replace(sample("a", tokens=tokens([10 + n])), choice=n) for n in range(2)]
        transitions.record(connection, both)
    record(ledger, "b", [12])
    for name, other in (("b", "a#1"), ("a#1", "a#0")):
        say(ledger, name, preferred_over=other)
        leased(ledger)
    say(ledger, "a#0", preferred_over="b")
    assert make_batch(leased(ledger)).unused == {"preference_circle": 1}


def test_rows_of_a_large_batch_are_none_of_those_that_are_followed(ledger, monkeypatch):
    monkeypatch.setattr(preferences, "_MOST_LINKED", 2)
    for number, name in enumerate("abcdef"):
        record(ledger, name, [10 + number])
    for name, other in (("a", "b"), ("b", "c")):
        say(ledger, name, preferred_over=other)
        leased(ledger)
    for name in "def":
        say(ledger, name, rating="up")
    say(ledger, "c", preferred_over="a")
    assert make_batch(leased(ledger)).unused == {"preference_circle": 1}
