"""All trainers that were ever started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from shared.ledger.conditions import AnyRow
from shared.ledger.connect import database_time
from shared.ledger.tables import trainer_states, trainers

_ALIVE_S = 30.0  # maximum age of a live trainer's heartbeat, which is sent every five seconds


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A row of `trainers`."""

    name: str
    step: int
    version: int
    state_path: str | None
    state_sha256: str | None
    trouble: str | None  # why it cannot publish
    tripped: dict[str, Any] | None  # the bound of its breaker that was crossed: figure, value, bound, setting, fix
    resumed_version: int | None  # newest version when an operator last resumed it
    chosen: dict[str, Any] | None  # with `algorithm: auto`: the algorithms in use, with their weights
    stats: dict[str, Any]
    alive: bool  # it has not ended regularly; it may have been killed
    heartbeat_at: float
    rollbacks: int = 0  # how often an operator has returned it to an earlier version

    def is_live(self, now: float) -> bool:
        """Whether it has not stopped, and its heartbeat is recent. now: the database's time."""
        return self.alive and now - self.heartbeat_at < _ALIVE_S


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row of `trainer_states`."""

    trainer: str
    version: int
    path: str
    sha256: str | None
    step: int


def list_states(connection: Connection, trainer: str) -> list[StateRow]:
    """Return the saved states that a trainer keeps, oldest first."""
    own = select(trainer_states).where(trainer_states.c.trainer == trainer).order_by(trainer_states.c.version)
    return [StateRow(**row._mapping) for row in connection.execute(own)]


def list_trainers(connection: Connection) -> list[TrainerRow]:
    """Return all trainers, by name."""
    rows = connection.execute(select(trainers).order_by(trainers.c.name))
    return [TrainerRow(**{**row._mapping, **_decoded(row)}) for row in rows]


def _decoded(row: AnyRow) -> dict[str, Any]:
    """Decode the columns that are stored as JSON."""
    return {"stats": _decode(row.stats) or {}, "tripped": _decode(row.tripped), "chosen": _decode(row.chosen)}


def _decode(data: bytes | None) -> dict[str, Any] | None:
    return msgspec.json.decode(data) if data else None


def find_trainer(connection: Connection, name: str) -> TrainerRow | None:
    """Return the trainer with this name."""
    return next((row for row in list_trainers(connection) if row.name == name), None)


def live_trainers(connection: Connection) -> list[str]:
    """Return the names of live trainers: they have not stopped, and their heartbeats are recent."""
    now = database_time(connection)
    return [row.name for row in list_trainers(connection) if row.is_live(now)]
