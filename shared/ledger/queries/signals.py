"""Signals about rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields

from sqlalchemy import Connection, func, or_, select

from shared.experience import Experience, TrajectoryKey, trajectory_key
from shared.ledger.conditions import AnyRow, are_about, in_parts, in_trajectories
from shared.ledger.tables import experiences, signals
from shared.reward import Kind, Signal

_FIELDS = tuple(field.name for field in fields(Signal))  # which are columns
_RECENT = 10_000  # signals
_RECENT_ROWS = 1_000


def count_signals(connection: Connection, ids: Sequence[int]) -> dict[int, int]:
    """Return the number of signals about these rows, by row id; rows without signals are absent."""
    counts = select(experiences.c.id, func.count()).join(signals, are_about()).group_by(experiences.c.id)
    return {
        row_id: n for mine in in_parts(experiences.c.id, ids) for row_id, n in connection.execute(counts.where(mine))
    }


def recent_kinds(connection: Connection, metrics: Collection[str] | None = None) -> dict[Kind, int]:
    """Count the latest signals by kind. metrics: names of those to count; None: all."""
    latest = select(signals.c.kind, signals.c.name).order_by(signals.c.id.desc()).limit(_RECENT).subquery()
    counts = select(latest.c.kind, func.count()).group_by(latest.c.kind).order_by(latest.c.kind)
    if metrics is not None:
        counts = counts.where(or_(latest.c.kind != "metric", latest.c.name.in_(sorted(metrics))))
    found: dict[Kind, int] = dict(row for row in connection.execute(counts))
    return found


def tasks_repeat(connection: Connection) -> bool:
    """Whether most of the latest rows belong to tasks, with two or more attempts at each on average."""
    columns = (experiences.c[name] for name in ("id", "task_id", "run_id", "key_group", "conversation_id"))
    return do_repeat(connection.execute(select(*columns).order_by(experiences.c.id.desc()).limit(_RECENT_ROWS)).all())


def do_repeat(rows: Sequence[AnyRow] | Sequence[Experience]) -> bool:
    """Whether most rows belong to tasks, with two or more attempts at each on average.

    Without a name of a run, each conversation is an attempt.
    """
    of_tasks = [row for row in rows if row.task_id is not None]
    tasks = len({(row.key_group, row.task_id) for row in of_tasks})
    return 2 * len(of_tasks) > len(rows) and len({trajectory_key(row) for row in of_tasks}) >= 2 * tasks > 0


def corrected_later(connection: Connection, rows: Iterable[Experience]) -> set[TrajectoryKey]:
    """Return the trajectories whose last correction of the whole is about a later reply than those among `rows`."""
    last: dict[TrajectoryKey, tuple[int, Signal]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        for signal in row.signals:
            if signal.kind == "correction" and signal.scope != "message":
                last[trajectory_key(row)] = row.id, signal
    names = ("id", "msg_id", "choice", "task_id", "run_id", "key_group", "conversation_id")
    query = select(*(experiences.c[name] for name in names))
    found = (row for mine in in_trajectories(last) for row in connection.execute(query.where(mine)).all())
    later = [row for row in found if row.id > last[trajectory_key(row)][0]]
    kinds: tuple[Kind, ...] = ("correction",)
    log = load_signals(connection, later, kinds)
    return {key for row in later if last[key := trajectory_key(row)][1] in log[row.msg_id, row.choice]}


def load_signals(
    connection: Connection, rows: Iterable[AnyRow | Experience], kinds: Collection[Kind] | None = None
) -> dict[tuple[str, int], list[Signal]]:
    """Return the log of each row, oldest first, by message and choice; empty if it has no signals.

    kinds: of the signals; None: all.
    """
    log: dict[tuple[str, int], list[Signal]] = {(row.msg_id, row.choice): [] for row in rows}
    choices = sorted({choice for _, choice in log})
    columns = (signals.c[name] for name in ("msg_id", "choice", *_FIELDS))
    query = select(*columns).where(signals.c.choice.in_(choices)).order_by(signals.c.id)
    if kinds is not None:
        query = query.where(signals.c.kind.in_(sorted(kinds)))
    for mine in in_parts(signals.c.msg_id, sorted({msg_id for msg_id, _ in log})):
        for msg_id, choice, *values in connection.execute(query.where(mine)).all():
            if (of_row := log.get((msg_id, choice))) is not None:
                of_row.append(Signal(*values))
    return log
