"""Words that are said again after others count as said last, as long as they have not acted. On both databases."""

from __future__ import annotations

import pytest

from shared.reward import Signal
from tests.support.lessons import claim, commit, publish, record, say


def acting(ledger) -> list[tuple[str, str, str]]:
    """Kind, text and scope of what acts on the row of the next batch, oldest first."""
    commit(ledger)
    (row,) = claim(ledger).rows
    return [(signal.kind, signal.text, signal.scope) for signal in row.signals]


@pytest.mark.parametrize("kind", ["comment", "correction"])
@pytest.mark.parametrize("said", [("Monday", "Tuesday", "Monday"), ("Monday", "", "Monday")])
def test_who_goes_back_to_earlier_words_means_those(ledger, kind, said):
    record(ledger, "a")
    assert [say(ledger, "a", Signal(kind, text=text)) for text in said] == ["applied"] * 3
    assert acting(ledger) == [(kind, said[1], "message"), (kind, said[2], "message")]


def test_the_same_words_of_a_run_and_of_one_of_its_messages_are_two(ledger):
    record(ledger, "a", task_id="t", run_id="1")
    correction = Signal("correction", text="Monday")
    say(ledger, "a", correction, msg_ids=[], task_id="t", run_id="1")
    assert say(ledger, "a", correction) == "applied"
    assert acting(ledger) == [("correction", "Monday", "run"), ("correction", "Monday", "message")]


def test_words_that_have_acted_do_not_act_again_because_they_are_repeated(ledger):
    record(ledger, "a")
    say(ledger, "a", Signal("comment", text="Monday"))
    commit(ledger)
    publish(ledger, claim(ledger), 1)
    for text in ("Tuesday", "Monday"):
        say(ledger, "a", Signal("comment", text=text))
    assert acting(ledger) == [("comment", "Tuesday", "message")]
