"""A chat names many exchanges that it may continue: however many, the ledger's writer looks for them at once."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select

from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.tables import experiences
from tests.support.samples import sample

MOST = tuple(b"%08d" % number for number in range(352))  # 64 turns, of which 16 may be 18 rewritten replies more


def parents(ledger: Ledger) -> dict[str, str | None]:
    with ledger.read() as connection:
        query = select(experiences.c.msg_id, experiences.c.parent_id)
        return {row.msg_id: row.parent_id for row in connection.execute(query)}


def record(ledger: Ledger, *samples: Any) -> int:
    """Returns how many statements looked for an exchange."""
    asked: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(ledger._engine, "before_cursor_execute", note)
    with ledger.write() as connection:
        transitions.record(connection, samples)
    event.remove(ledger._engine, "before_cursor_execute", note)
    return sum("WHERE exchange =" in statement for statement in asked)


def test_many_choices_of_a_long_history_are_looked_for_in_few_statements(ledger):
    choices = [sample("m", choice=choice, extends=MOST) for choice in range(64)]
    assert record(ledger, *choices) <= 3
    assert parents(ledger) == {"m": None}


@pytest.mark.parametrize("place", [0, 1, 200, 351])
def test_of_many_exchanges_the_first_that_is_stored_is_continued(ledger, place):
    record(ledger, *(sample(f"turn-{at}", exchange=MOST[at]) for at in {351, place}))
    assert record(ledger, *(sample(f"next-{n}", extends=MOST) for n in range(2))) <= 3
    assert parents(ledger)["next-0"] == parents(ledger)["next-1"] == f"turn-{place}"
