"""Turns of conversations that are written together are linked as if they were written one after another."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from shared.experience import Sample
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.queries import version_of_exchange
from shared.ledger.tables import experiences
from tests.support.samples import sample


def record(ledger: Ledger, samples: list[Sample], *, together: bool) -> None:
    for group in [samples] if together else [[one] for one in samples]:
        with ledger.write() as connection:
            transitions.record(connection, group)


def links(ledger: Ledger) -> dict[str, tuple[str | None, str | None]]:
    """By message: its parent and its conversation."""
    columns = (experiences.c.msg_id, experiences.c.parent_id, experiences.c.conversation_id)
    with ledger.read() as connection:
        return {row.msg_id: (row.parent_id, row.conversation_id) for row in connection.execute(select(*columns))}


@pytest.mark.parametrize("together", [False, True])
def test_conversations_that_are_alike_are_continued_once_each(ledger, together):
    record(ledger, [sample(name, exchange=b"1") for name in ("a1", "b1")], together=together)
    record(ledger, [sample(name, exchange=b"2", extends=(b"1",)) for name in ("a2", "b2")], together=together)
    assert links(ledger) == {"a1": (None, "a1"), "a2": ("a1", "a1"), "b1": (None, "b1"), "b2": ("b1", "b1")}


@pytest.mark.parametrize("together", [False, True])
def test_a_turn_is_linked_to_the_one_before(ledger, together):
    """A caller may continue a stream whose row is not stored yet."""
    turns = [sample(f"m{n}", exchange=b"%d" % n, extends=(b"%d" % (n - 1),) if n else ()) for n in range(3)]
    record(ledger, turns, together=together)
    assert links(ledger) == {"m0": (None, "m0"), "m1": ("m0", "m0"), "m2": ("m1", "m0")}


def test_the_choices_of_a_message_continue_the_same_one(ledger):
    record(ledger, [sample(name, exchange=b"1") for name in ("a1", "b1")], together=True)
    record(ledger, [sample("a2", choice=choice, extends=(b"1",)) for choice in range(2)], together=True)
    assert links(ledger) == {"a1": (None, "a1"), "a2": ("a1", "a1"), "b1": (None, None)}


def test_the_version_of_a_conversation_is_that_of_the_exchange_that_it_will_be_linked_to(ledger):
    """Of two that begin alike, at two versions, each second turn gets the version of its own first one."""
    first = [sample(name, version=version, exchange=b"1") for name, version in (("a1", 1), ("b1", 3))]
    record(ledger, first, together=True)
    for name, version in (("a2", 1), ("b2", 3)):
        assert ledger.fetch(lambda connection: version_of_exchange(connection, (b"1",))) == version
        record(ledger, [sample(name, version=version, exchange=b"2", extends=(b"1",))], together=True)
    assert {name: parent for name, (parent, _) in links(ledger).items() if parent} == {"a2": "a1", "b2": "b1"}
