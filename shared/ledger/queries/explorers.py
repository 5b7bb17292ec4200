"""Live explorers, the engines that they share, and their open streams."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, select

from shared.ledger.conditions import in_group, in_parts
from shared.ledger.connect import database_clock, database_time
from shared.ledger.tables import calibrations, engines, explorers, open_streams

LIVE_S = 6.0  # age of a heartbeat up to which an explorer is live


@dataclass(frozen=True, slots=True)
class EngineRow:
    """The last state of an engine that its owner wrote."""

    url: str
    owner: str | None
    state: str
    version: int | None
    generation: int
    spoiled: int  # the generation in which weights that failed their proof last sampled requests in flight
    switched_at: float  # clock.since_boot_s() of this machine: when its weights were last replaced


class Followed(msgspec.Struct, array_like=True, frozen=True):
    """The state of an engine that an explorer has acknowledged."""

    generation: int = -1
    seeded: int = 0  # its requests with a seed in flight there
    ending: list[int] = []  # versions that get no new requests, but still have some in flight


def live_explorers(connection: Connection) -> dict[str, dict[str, Followed]]:
    """Return the live explorers, with what they have acknowledged of each of their engines."""
    query = select(explorers).where(_is_alive(connection))
    return {row.id: _decode_followed(row.acknowledged) for row in connection.execute(query)}


def settings_of_explorers(connection: Connection) -> dict[str, dict[str, Any]]:
    """Return the settings of each live explorer in which all processes must agree, by key."""
    query = select(explorers.c.id, explorers.c.settings).where(_is_alive(connection))
    return {row.id: msgspec.json.decode(row.settings or b"{}") for row in connection.execute(query)}


def read_engine(connection: Connection, url: str) -> EngineRow | None:
    """Return the engine's row, or None before any explorer has acquired it."""
    columns = [engines.c[field.name] for field in fields(EngineRow)]
    row = connection.execute(select(*columns).where(engines.c.url == url)).one_or_none()
    if row is None:
        return None
    return EngineRow(**{**row._mapping, "switched_at": row.switched_at - database_clock(connection)})


def owned_engines(connection: Connection, explorer: str) -> frozenset[str]:
    """Return the engines that the explorer has leased, by the names in leases."""
    return frozenset(connection.execute(select(engines.c.url).where(engines.c.owner == explorer)).scalars())


def any_stream_open(connection: Connection, msg_ids: Collection[str]) -> bool:
    """Whether a live explorer still streams one of these messages."""
    living = select(explorers.c.id).where(_is_alive(connection))
    query = select(open_streams.c.msg_id).where(open_streams.c.explorer.in_(living)).limit(1)
    parts = in_parts(open_streams.c.msg_id, list(msg_ids))
    return any(connection.execute(query.where(part)).first() is not None for part in parts)


def streams_of_task(connection: Connection, task_id: str, run_id: str | None, key_group: str | None) -> list[str]:
    """Return the open streams of a task, or of one run of it, at live explorers. key_group: see in_group()."""
    living = select(explorers.c.id).where(_is_alive(connection))
    query = select(open_streams.c.msg_id).where(open_streams.c.explorer.in_(living), in_group(key_group, open_streams))
    query = query.where(open_streams.c.task_id == task_id)
    if run_id is not None:
        query = query.where(open_streams.c.run_id == run_id)
    return list(connection.execute(query).scalars())


def _is_alive(connection: Connection) -> ColumnElement[bool]:
    now = database_time(connection)
    return explorers.c.heartbeat_at.between(now - LIVE_S, now + LIVE_S)


def read_calibration(connection: Connection, engine: str, dtype: str) -> tuple[float, float] | None:
    """Return the largest and the mean difference of an engine from the trainer on version 0; None: unknown."""
    of_engine = (calibrations.c.engine == engine, calibrations.c.dtype == dtype)
    row = connection.execute(select(calibrations.c.largest, calibrations.c.mean).where(*of_engine)).one_or_none()
    return None if row is None else (row.largest, row.mean)


_decode_followed = msgspec.json.Decoder(dict[str, Followed]).decode
