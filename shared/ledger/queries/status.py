"""The figures for `flywheel status`, GET /status and GET /metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, func, select

from shared.experience import VersionState
from shared.ledger.conditions import is_ready
from shared.ledger.connect import database_time
from shared.ledger.queries.ahead import trained_ahead
from shared.ledger.queries.explorers import live_explorers
from shared.ledger.queries.lease import quarantined
from shared.ledger.queries.rows import count_by_state, count_ready
from shared.ledger.queries.trainers import TrainerRow, list_trainers
from shared.ledger.queries.versions import VersionRow, kept_versions, shares_of_traffic
from shared.ledger.tables import batches, engines, experiences, versions

_MINUTE_S = 60.0
_END_ROWS = 10_000  # number of newest rows from which the pace is read
_END_BATCHES = 1_000  # number of newest batches, and of newest versions, from which it is read


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate at which rows are recorded and trained on. Imported rows keep their times, and count by these."""

    oldest_ready_s: float | None  # age of the oldest row that waits for a trainer, since its chat arrived
    recorded_per_minute: float
    trained_per_minute: float


def pace(connection: Connection, now: float) -> Pace:
    """Return the pace of the last minute from the newest rows only, whatever the size of the table is."""
    ready = select(experiences.c.created_at).where(*is_ready()).order_by(experiences.c.id)
    oldest = connection.execute(ready.limit(1)).scalar()
    # created_at is when the chat arrived
    recorded_at = (experiences.c.created_at + func.coalesce(experiences.c.latency_s, 0.0)).label("recorded_at")
    end = select(recorded_at).order_by(experiences.c.id.desc()).limit(_END_ROWS).subquery()
    counted, since = connection.execute(
        select(func.count(), func.min(end.c.recorded_at)).where(end.c.recorded_at > now - _MINUTE_S)
    ).one()
    span_s = now - since if counted == _END_ROWS else _MINUTE_S  # all of them are younger than a minute
    made = select(versions.c.version).where(_newest(versions.c.version), versions.c.created_at > now - _MINUTE_S)
    consumed = select(batches.c.id).where(_newest(batches.c.id), batches.c.consumed_version.in_(made))
    rows = select(func.count()).select_from(experiences).where(experiences.c.batch_id.in_(consumed))
    trained = connection.execute(rows).scalar_one()
    trained += sum(ahead.trained_since(now - _MINUTE_S) for ahead in trained_ahead(connection).values())
    return Pace(
        None if oldest is None else max(0.0, now - oldest), _MINUTE_S * counted / max(span_s, 1e-3), float(trained)
    )


def _newest(number: Column[int]) -> ColumnElement[bool]:
    return number > select(func.max(number)).scalar_subquery() - _END_BATCHES


class Tripped(NamedTuple):
    """The figure that tripped a trainer's breaker, and the fix."""

    figure: str
    fix: str


@dataclass(frozen=True, slots=True)
class LedgerProgress:
    """Progress of training and reloading."""

    ready: int  # rows
    step: int  # largest number of updates that the saved state of a trainer in use contains
    newest: int  # newest version
    lag: int  # the newest version minus the one in service, or minus 0 if none is
    tripped: list[Tripped]  # for each trainer in use whose breaker has tripped


def progress(connection: Connection) -> LedgerProgress:
    """Read the progress from indexes only, whatever the size of the table is."""
    newest, serving = _newest_and_serving(kept_versions(connection))
    trainers = _in_use(connection)
    held = [t.tripped for t in trainers if t.tripped is not None]
    tripped = [Tripped(str(one["figure"]), str(one.get("fix", ""))) for one in held]
    step = max((t.step for t in trainers), default=0)
    return LedgerProgress(count_ready(connection), step, newest or 0, (newest or 0) - (serving or 0), tripped)


def _in_use(connection: Connection) -> list[TrainerRow]:
    """Return the live trainers, or else the one that lived last: a name that was given up keeps its row forever."""
    trainers, now = list_trainers(connection), database_time(connection)
    last = sorted(trainers, key=attrgetter("heartbeat_at"))[-1:]
    return [t for t in trainers if t.is_live(now)] or last


class EngineSeen(NamedTuple):
    """An engine that a live explorer uses."""

    key: str  # its address; for a loopback one, prefixed with the machine's name
    state: str | None  # that its owner last announced; None: no explorer owns it, as none reaches it, for example
    version: int | None


def engines_in_use(connection: Connection) -> list[EngineSeen]:
    """Return the engines of live explorers, by address."""
    owned = (engines.c.owner.is_not(None), engines.c.owner_until >= database_time(connection))
    announced = {row.url: row for row in connection.execute(select(engines).where(*owned))}
    keys = {key for followed in live_explorers(connection).values() for key in followed}
    found = ((key, announced.get(key)) for key in sorted(keys))
    return [EngineSeen(key, *((None, None) if row is None else (row.state, row.version))) for key, row in found]


def ledger_status(connection: Connection) -> dict[str, Any]:
    """Return rows by state and their pace, versions, trainers, and the lag in versions."""
    now = database_time(connection)
    rows, flow = count_by_state(connection), pace(connection, now)
    newest, serving = _newest_and_serving(kept_versions(connection))
    published, reloads = _count_versions(connection)
    ahead = trained_ahead(connection)
    return {
        "rows": rows,
        "quarantined": quarantined(connection),
        "pace": {name: None if value is None else round(value, 1) for name, value in asdict(flow).items()},
        "versions": {
            "newest": newest,
            "serving": serving,
            "published": published,
            "reloads": reloads,
            "shares": {str(version): share for version, share in shares_of_traffic(connection).items()},
        },
        "trainers": [
            {
                "name": t.name,
                "step": t.step,
                "version": t.version,
                "at_step": ahead[t.name].step if t.name in ahead else t.step,
                "at_version": ahead[t.name].version if t.name in ahead else t.version,
                "rows_waiting_for_state": ahead[t.name].waiting if t.name in ahead else 0,
                "alive": t.is_live(now),
                "heartbeat_age_s": round(now - t.heartbeat_at, 1),
                "stats": t.stats,
                "trouble": t.trouble,
                "tripped": t.tripped,
                "chosen": t.chosen,
            }
            for t in list_trainers(connection)
        ],
        "lag_versions": (newest or 0) - (serving or 0),
    }


def _newest_and_serving(kept: list[VersionRow]) -> tuple[int | None, int | None]:
    newest = max((v.version for v in kept if v.may_serve), default=None)
    return newest, max((v.version for v in kept if v.state == VersionState.SERVING), default=None)


def _count_versions(connection: Connection) -> tuple[int, int]:
    """Return how many versions after the base were published, and how many of them have served."""
    counts = select(func.count(), func.count(versions.c.served_at))
    made = (versions.c.version > 0, versions.c.state != VersionState.RESERVED)
    published, served = connection.execute(counts.where(*made)).one()
    return published, served
