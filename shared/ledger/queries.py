"""Reads of the ledger that more than one place needs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, func, select

from shared.experience import State
from shared.ledger.connect import KeptConnection
from shared.ledger.tables import batches, experiences, trainers, versions

_END_ROWS = 10_000

MAX_PARAMETERS = 1000  # values in one IN list


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A row of `versions`."""

    version: int
    parent: int | None
    kind: str
    path: str
    state: str
    reason: str | None
    step: int
    created_at: float
    served_at: float | None


def list_versions(connection: Connection) -> list[VersionRow]:
    """All versions, oldest first."""
    return [VersionRow(**row._mapping) for row in connection.execute(select(versions).order_by(versions.c.version))]


# As the driver takes it: an explorer asks this twice a second.
_NEWEST = (
    f"SELECT {', '.join(field.name for field in fields(VersionRow))} FROM {versions.name}"
    " WHERE state <> 'REJECTED' ORDER BY version DESC LIMIT 1"
)


def newest_version(connection: KeptConnection) -> VersionRow | None:
    """The version that should serve: the newest that was not rejected."""
    row = connection.ask(_NEWEST)
    return None if row is None else VersionRow(*row)


def highest_version_number(connection: Connection) -> int:
    """The highest number in use, rejected ones included; -1 when there is none."""
    highest = connection.execute(select(func.max(versions.c.version))).scalar()
    return -1 if highest is None else int(highest)


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A row of `trainers`."""

    name: str
    step: int
    version: int
    state_path: str | None
    stats: dict[str, Any]
    alive: bool
    heartbeat_at: float


def list_trainers(connection: Connection) -> list[TrainerRow]:
    """All trainers that ever announced themselves."""
    return [
        TrainerRow(**{**row._mapping, "stats": msgspec.json.decode(row.stats) if row.stats else {}})
        for row in connection.execute(select(trainers).order_by(trainers.c.name))
    ]


def find_trainer(connection: Connection, name: str) -> TrainerRow | None:
    """The trainer of this name."""
    return next((row for row in list_trainers(connection) if row.name == name), None)


@dataclass(frozen=True, slots=True)
class Pace:
    """How the rows flow."""

    oldest_ready_s: float | None  # since when the first row that waits for a trainer was recorded
    recorded_per_minute: float
    trained_per_minute: float


def pace(connection: Connection, now: float, window_s: float = 60.0) -> Pace:
    """The flow of the last minute; of a ledger of any length only its end is read."""
    ready = select(experiences.c.created_at).where(experiences.c.state == State.READY).order_by(experiences.c.id)
    oldest = connection.execute(ready.limit(1)).scalar()
    end = select(experiences.c.created_at).order_by(experiences.c.id.desc()).limit(_END_ROWS).subquery()
    counted, since = connection.execute(
        select(func.count(), func.min(end.c.created_at)).where(end.c.created_at > now - window_s)
    ).one()
    span_s = now - since if counted == _END_ROWS else window_s  # more than that: so many in less than a minute
    made = select(versions.c.version).where(versions.c.created_at > now - window_s)
    trained = connection.execute(
        select(func.count())
        .select_from(experiences)
        .join(batches, batches.c.id == experiences.c.batch_id)
        .where(batches.c.consumed_version.in_(made))
    ).scalar_one()
    return Pace(
        None if oldest is None else max(0.0, now - oldest), 60 * counted / max(span_s, 1e-3), 60 * trained / window_s
    )


def size_bytes(connection: Connection) -> int:
    """What the database takes on disk, without what SQLite keeps free."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())
    sizes = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "freelist_count"))
    page_size = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    return int((next(sizes) - next(sizes)) * page_size)


def count_rows(connection: Connection) -> int:
    """All recorded rows."""
    return int(connection.execute(select(func.count()).select_from(experiences)).scalar_one())


def known_choices(connection: Connection, msg_ids: list[str]) -> set[tuple[str, int]]:
    """The choices of these messages that stand already."""
    query = select(experiences.c.msg_id, experiences.c.choice).where(experiences.c.msg_id.in_(msg_ids))
    return {(row.msg_id, row.choice) for row in connection.execute(query)}


def is_done(before: float | None) -> list[ColumnElement[bool]]:
    """Rows that nobody will train on any more, recorded before this moment (Unix seconds) if one is given."""
    done = experiences.c.state.in_((State.CONSUMED, State.DISCARDED))
    return [done] if before is None else [done, experiences.c.created_at < before]


def oldest_done(connection: Connection, *, before: float | None, at_most: int) -> list[int]:
    """Ids of such rows, oldest first."""
    query = select(experiences.c.id).where(*is_done(before)).order_by(experiences.c.id).limit(at_most)
    return list(connection.execute(query).scalars())


def count_by_state(connection: Connection) -> dict[str, int]:
    """Rows in each state, zeros included."""
    query = select(experiences.c.state, func.count()).group_by(experiences.c.state)
    counted: dict[str, int] = dict(row for row in connection.execute(query))
    return {state.value: counted.get(state, 0) for state in State}
