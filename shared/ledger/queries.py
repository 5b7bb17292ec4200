"""Reads of the ledger that more than one place needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from shared.experience import State
from shared.ledger.tables import experiences, trainers, versions


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


def newest_version(connection: Connection) -> VersionRow | None:
    """The version that should serve: the newest that was not rejected."""
    query = select(versions).where(versions.c.state != "REJECTED").order_by(versions.c.version.desc()).limit(1)
    row = connection.execute(query).one_or_none()
    return None if row is None else VersionRow(**row._mapping)


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


def count_by_state(connection: Connection) -> dict[str, int]:
    """Rows in each state, zeros included."""
    query = select(experiences.c.state, func.count()).group_by(experiences.c.state)
    counted: dict[str, int] = dict(row for row in connection.execute(query))
    return {state.value: counted.get(state, 0) for state in State}
