"""A signal's number says whether it acted: numbers never come again, though the newest signals are deleted."""

from __future__ import annotations

import pytest

from shared.config import ledger_url
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.migrate import copy_ledger
from shared.reward import Lesson, Signal
from tests.support.lessons import COMMENT, UP, claim, commit, publish, record, say, train


@pytest.fixture
def urls(tmp_path, database_url, postgres) -> list[str]:
    """Two empty databases of one kind."""
    if database_url:
        return [ledger_url(postgres.new_database()) for _ in range(2)]
    return [f"sqlite:///{tmp_path / name}" for name in ("first.sqlite3", "second.sqlite3")]


def with_deleted_signals(ledger: Ledger) -> Ledger:
    """`m` was trained with a comment, and what was said later of another row is erased."""
    record(ledger, "m")
    record(ledger, "gone")
    say(ledger, "m", COMMENT)
    for number in range(5):
        say(ledger, "gone", Signal("comment", text=f"comment {number}"))
    assert train(ledger, 1)["m"] == (Lesson.COMMENT, None, ["comment"])
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="gone")
    return ledger


def test_a_comment_acts_though_the_newest_signals_were_erased_before_it(urls):
    ledger = with_deleted_signals(Ledger.open(urls[0]))
    assert say(ledger, "m", Signal("comment", text="too rude")) == "applied"
    assert train(ledger, 2) == {"m": (Lesson.COMMENT, None, ["comment"])}
    ledger.close()


def test_and_though_a_batch_was_claimed_since(urls):
    ledger = Ledger.open(urls[0])
    record(ledger, "m", "other", "gone")
    for name, signal in (("m", COMMENT), ("other", UP), ("gone", COMMENT)):
        say(ledger, name, signal)
    commit(ledger)
    publish(ledger, claim(ledger, at_most=1), 1)
    with ledger.write() as connection:
        transitions.erase(connection, msg_id="gone")
    publish(ledger, claim(ledger, at_most=1), 2)
    assert say(ledger, "m", Signal("comment", text="too rude")) == "applied"
    assert train(ledger, 3) == {"m": (Lesson.COMMENT, None, ["comment"])}
    ledger.close()


def test_and_though_the_ledger_was_copied_meanwhile(urls):
    source, target = with_deleted_signals(Ledger.open(urls[0])), Ledger.open(urls[1])
    with source.read() as reading, target.write() as writing:
        copy_ledger(reading, writing, lambda *_: None)
    source.close()
    assert say(target, "m", Signal("comment", text="too rude")) == "applied"
    assert train(target, 2) == {"m": (Lesson.COMMENT, None, ["comment"])}
    target.close()
