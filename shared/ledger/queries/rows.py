"""Lists and counts experiences, and measures their size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, exists, func, select, text

from shared.experience import State, choice_name
from shared.ledger.conditions import AnyRow, in_group, in_parts, in_scope, is_done, is_ready
from shared.ledger.connect import placeholder
from shared.ledger.tables import experiences, row_counts

_MAX_ALIKE = 32  # number of equal exchanges, newest first, among which a parent is chosen
_ALIKE = {
    mark: f"SELECT id, msg_id, choice, conversation_id, version FROM {experiences.name} WHERE exchange = {mark}"
    f" ORDER BY id DESC LIMIT {_MAX_ALIKE}"
    for mark in ("?", "%s")
}


def count_by_state(connection: Connection) -> dict[str, int]:
    """Return the number of rows in each state, including zeros."""
    query = select(row_counts.c.state, func.sum(row_counts.c.n)).group_by(row_counts.c.state)
    counted = {state: int(n) for state, n in connection.execute(query)}
    return {state.value: counted.get(state, 0) for state in State}


def count_ready(connection: Connection, *, at_most: int | None = None, after_id: int = 0) -> int:
    """Return how many rows wait for a trainer, counted up to `at_most`, after the row `after_id`."""
    if at_most is None and not after_id:
        return count_by_state(connection)[State.READY]
    ready = select(experiences.c.id).where(*is_ready(after_id)).limit(at_most).subquery()
    return int(connection.execute(select(func.count()).select_from(ready)).scalar_one())


def oldest_ready(connection: Connection) -> int | None:
    """Return the id of the oldest row that waits for a trainer."""
    oldest: int | None = connection.execute(select(func.min(experiences.c.id)).where(*is_ready())).scalar()
    return oldest


def oldest_done(connection: Connection, *, before: float | None, at_most: int) -> list[int]:
    """Return ids of rows that are trained on or discarded, oldest first."""
    query = select(experiences.c.id).where(*is_done(before)).order_by(experiences.c.id).limit(at_most)
    return list(connection.execute(query).scalars())


def names_of_rows(connection: Connection, ids: Sequence[int]) -> dict[int, tuple[str, int]]:
    """Return the message ids and choices of rows, by id."""
    names = select(experiences.c.id, experiences.c.msg_id, experiences.c.choice)
    parts = (connection.execute(names.where(part)) for part in in_parts(experiences.c.id, ids))
    return {row.id: (row.msg_id, row.choice) for part in parts for row in part}


def known_choices(connection: Connection, msg_ids: list[str]) -> set[tuple[str, int]]:
    """Return the choices of these messages that are stored."""
    query = select(experiences.c.msg_id, experiences.c.choice).where(experiences.c.msg_id.in_(msg_ids))
    return {(row.msg_id, row.choice) for row in connection.execute(query)}


def exchange_of_choice(connection: Connection, msg_id: str, choice: int | None) -> bytes | None:
    """Return the digest of the exchange that a choice ends; None if it has none, or is not stored."""
    mine = experiences.c.msg_id == msg_id, experiences.c.choice == (choice or 0)
    found: bytes | None = connection.execute(select(experiences.c.exchange).where(*mine)).scalar()
    return found


def ids_of(connection: Connection, choices: Collection[tuple[str, int]]) -> set[int]:
    """Return the ids of these choices, as far as they are stored."""
    query = select(experiences.c.id, experiences.c.msg_id, experiences.c.choice)
    parts = in_parts(experiences.c.msg_id, sorted({msg_id for msg_id, _ in choices}))
    found = (row for part in parts for row in connection.execute(query.where(part)))
    return {row.id for row in found if (row.msg_id, row.choice) in choices}


@dataclass(slots=True)
class Alike:
    """Equal exchanges, oldest first."""

    exchange: bytes = b""  # their digest
    rows: Sequence[AnyRow] = ()
    turns: Counter[str | None] = field(default_factory=Counter)  # next turns, by the name of what they continue

    def continue_one(self) -> AnyRow | None:
        """Return the exchange that a new turn continues: the oldest of those with the fewest next turns; count it."""
        chosen = min(self.rows, key=lambda row: self.turns[choice_name(row.msg_id, row.choice)], default=None)
        if chosen is not None:
            self.turns[choice_name(chosen.msg_id, chosen.choice)] += 1
        return chosen


def find_alike(connection: Connection, extends: Sequence[bytes]) -> Alike:
    """Find the rows of the longest stored exchange, and their next turns if there are several rows.

    extends: digests of exchanges, the longest first, at least one.
    """
    for exchange in _longest_stored(connection, extends):
        rows = connection.exec_driver_sql(_ALIKE[placeholder(connection)], (exchange,)).all()
        if len(rows) == 1:
            return Alike(exchange, rows)
        if rows:
            names = [choice_name(row.msg_id, row.choice) for row in rows]
            continued = select(experiences.c.parent_id).where(experiences.c.parent_id.in_(names))
            return Alike(exchange, rows[::-1], Counter(connection.execute(continued).scalars()))
    return Alike()


def _longest_stored(connection: Connection, extends: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the longest exchange, which usually is stored; then, by one query, the first stored one of the others."""
    yield extends[0]
    others = extends[1:]
    if others:
        mark = placeholder(connection)
        values = ", ".join(f"({place}, {mark})" for place in range(len(others)))
        # a subquery with a limit: PostgreSQL searches the index for each value, and does not join the whole table
        query = (
            f"WITH asked(place, exchange) AS (VALUES {values}) SELECT place FROM asked WHERE"
            f" (SELECT 1 FROM {experiences.name} WHERE exchange = asked.exchange LIMIT 1) IS NOT NULL"
            " ORDER BY place LIMIT 1"
        )
        for (place,) in connection.exec_driver_sql(query, tuple(others)):
            yield others[place]


def version_of_exchange(connection: Connection, extends: Sequence[bytes]) -> int | None:
    """Return the version that answered last in the exchange that a chat continues; None if none is stored."""
    row = find_alike(connection, extends).continue_one()
    return None if row is None else int(row.version)


@dataclass(frozen=True, slots=True)
class RunRow:
    """The columns of a row in the list of a run."""

    id: int
    msg_id: str
    choice: int
    run_id: str | None
    version: int
    state: str
    reward: float | None
    outcome: float | None
    n_prompt: int
    n_reply: int
    is_one_of_several: bool  # choices of its message

    def shown(self) -> dict[str, Any]:
        """Return it as JSON, with a name that feedback finds this row alone by: ID would name all choices."""
        is_numbered = self.choice or self.is_one_of_several
        named = {"msg_id": f"{self.msg_id}#{self.choice}" if is_numbered else self.msg_id, "run_id": self.run_id}
        tokens = {"prompt": self.n_prompt, "reply": self.n_reply}
        about = {"version": self.version, "state": self.state, "reward": self.reward, "outcome": self.outcome}
        return {**named, **about, "tokens": tokens}


def list_run(
    connection: Connection, *, task_id: str, run_id: str | None, key_group: str | None, after_id: int, at_most: int
) -> list[RunRow]:
    """Return rows of a run, oldest first; run_id None: of all runs of the task. key_group: see in_group()."""
    mine = (in_scope(task_id, run_id), in_group(key_group), experiences.c.id > after_id)
    other = experiences.alias()
    is_one_of_several = exists().where(other.c.msg_id == experiences.c.msg_id, other.c.choice != experiences.c.choice)
    columns = [experiences.c[field.name] for field in fields(RunRow) if field.name in experiences.c]
    query = select(*columns, is_one_of_several).where(*mine)
    return [RunRow(*row) for row in connection.execute(query.order_by(experiences.c.id).limit(at_most))]


def size_bytes(connection: Connection) -> int:
    """Return the size of the ledger's rows in bytes, without free space.

    SQLite: size of the pages in use, including indexes. PostgreSQL: size of the rows, which it reads for this.
    """
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_BYTES_OF_ROWS).scalar_one())
    pragmas = ("page_count", "freelist_count", "page_size")
    pages, free, page_bytes = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in pragmas)
    return int((pages - free) * page_bytes)


_BYTES_OF_ROWS = text(
    """
    SELECT (SELECT coalesce(sum(pg_column_size(e)), 0) FROM experiences e)
         + (SELECT coalesce(sum(pg_column_size(s)), 0) FROM signals s)
         + (SELECT coalesce(sum(pg_column_size(tokens) + coalesce(pg_column_size(request), 0)
                                + coalesce(pg_column_size(reply), 0)), 0) FROM payloads)
    """
)
