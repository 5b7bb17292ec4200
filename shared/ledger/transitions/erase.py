"""The end of rows: their contents are erased on demand, or they are removed once nobody trains on them any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, select, update

from shared.experience import State
from shared.ledger.prefix import make_whole
from shared.ledger.queries import MAX_PARAMETERS, is_done
from shared.ledger.tables import experiences, payloads, signals


def erase(
    connection: Connection,
    *,
    key_name: str | None = None,
    task_id: str | None = None,
    run_id: str | None = None,
    msg_id: str | None = None,
    after_id: int = 0,
) -> Erased:
    """Delete tokens, texts and signals of some of the rows in this scope; what was not trained on becomes DISCARDED.

    The narrow row stays, so that lineage still says which versions it went into.
    after_id: where the last call ended. `last_id` of the answer is None at the end.
    """
    scope = {"key_name": key_name, "task_id": task_id, "run_id": run_id, "msg_id": msg_id}
    named = [experiences.c[name] == value for name, value in scope.items() if value is not None]
    assert named, "an erasure names whose rows"
    columns = (experiences.c.id, experiences.c.msg_id, experiences.c.consumed_version)
    query = select(*columns).where(experiences.c.id > after_id, *named).order_by(experiences.c.id)
    rows = list(connection.execute(query.limit(MAX_PARAMETERS)))
    ids, names = [row.id for row in rows], sorted({row.msg_id for row in rows})
    connection.execute(delete(payloads).where(payloads.c.experience_id.in_(ids)))
    connection.execute(delete(signals).where(signals.c.msg_id.in_(names)))
    untrained = experiences.c.state.in_((State.RECORDED, State.READY))
    connection.execute(
        update(experiences).where(experiences.c.id.in_(ids), untrained).values(state=State.DISCARDED, reason="erased")
    )
    went_into = frozenset(row.consumed_version for row in rows if row.consumed_version is not None)
    return Erased(len(rows), went_into, rows[-1].id if rows else None)


def remove(connection: Connection, ids: Sequence[int]) -> int:
    """Delete rows that nobody will train on any more, with tokens, texts and signals. Returns how many."""
    removed = 0
    for start in range(0, len(ids), MAX_PARAMETERS):
        mine = experiences.c.id.in_(ids[start : start + MAX_PARAMETERS])
        (done,) = is_done(None)
        names = select(experiences.c.msg_id).where(mine, done)
        its_choice = and_(experiences.c.msg_id == signals.c.msg_id, experiences.c.choice == signals.c.choice)
        theirs = select(experiences.c.id).where(its_choice, mine, done).exists()
        connection.execute(delete(signals).where(signals.c.msg_id.in_(names), theirs))
        gone = connection.execute(select(experiences.c.id).where(mine, done)).scalars().all()
        make_whole(connection, gone)
        connection.execute(delete(payloads).where(payloads.c.experience_id.in_(gone)))
        removed += connection.execute(delete(experiences).where(mine, done)).rowcount
    return removed


@dataclass(frozen=True, slots=True)
class Erased:
    """What one call of `erase` did."""

    rows: int
    versions: frozenset[int]  # that the rows went into
    last_id: int | None
