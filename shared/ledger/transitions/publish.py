"""8, publish: a version becomes official, and with it its trainer's state; its rows become CONSUMED."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, insert, update
from sqlalchemy.dialects import postgresql, sqlite

from shared.experience import State
from shared.ledger.tables import batches, experiences, trainers, versions
from shared.ledger.transitions.rows import is_in
from shared.versions import version_path


class LeaseLost(Exception):
    """A batch is no longer held by this trainer: its update must not become official."""


def publish(
    connection: Connection,
    *,
    version: int,
    parent: int | None,
    kind: str,
    step: int,
    trainer: str | None = None,
    batch_ids: Collection[int] = (),
    state_path: str | None = None,
    stats: dict[str, float] | None = None,
) -> None:
    """Make a version official: its row, CONSUMED for the batches in it, and the trainer state that contains them.

    One transaction: after a crash either all of it stands or none. Raises LeaseLost when a batch is not ours any more.
    """
    now = time.time()
    connection.execute(
        insert(versions).values(
            version=version,
            parent=parent,
            kind=kind,
            path=version_path(version),
            state="PUBLISHED",
            step=step,
            created_at=now,
        )
    )
    if trainer is None:
        return
    mine = and_(batches.c.id.in_(batch_ids), batches.c.owner == trainer, is_in(batches.c.state, "LEASED"))
    held = connection.execute(update(batches).where(mine).values(state="CONSUMED", consumed_version=version)).rowcount
    if held != len(batch_ids):
        raise LeaseLost(f"{len(batch_ids) - held} of {len(batch_ids)} batches are no longer leased to {trainer!r}")
    connection.execute(
        update(experiences)
        .where(experiences.c.batch_id.in_(batch_ids), is_in(experiences.c.state, State.LEASED))
        .values(state=State.CONSUMED, consumed_version=version)
    )
    _save_trainer(
        connection,
        name=trainer,
        step=step,
        version=version,
        state_path=state_path,
        stats=msgspec.json.encode(stats or {}),
        alive=True,
        heartbeat_at=now,
    )


def announce_trainer(connection: Connection, *, name: str, step: int, version: int, state_path: str | None) -> None:
    """A trainer is up, at this point of its line."""
    _save_trainer(
        connection, name=name, step=step, version=version, state_path=state_path, alive=True, heartbeat_at=time.time()
    )


def dismiss_trainer(connection: Connection, *, name: str) -> None:
    """A trainer has stopped in order."""
    connection.execute(update(trainers).where(trainers.c.name == name).values(alive=False))


def _save_trainer(connection: Connection, *, name: str, **columns: Any) -> None:
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(trainers).values(name=name, **columns)
    connection.execute(statement.on_conflict_do_update(index_elements=[trainers.c.name], set_=columns))
