"""The commands that look at the ledger or move it, for a person: status, versions, rewards, erase, migrate."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from explorer_service.status import ledger_status
from shared.config import Config, ledger_url
from shared.errors import ConfigError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.ledger.migrate import copy_ledger
from shared.ledger.migrations import HEAD
from shared.ledger.queries import list_versions


def print_status(config: Config) -> int:
    """Rows by state, versions, trainers."""
    ledger = Ledger.open(config.ledger_url)
    try:
        status = ledger_status(ledger)
    finally:
        ledger.close()
    console = Console()
    console.print("rows      " + "  ".join(f"{state} {count}" for state, count in status["rows"].items()))
    pace = status["pace"]
    flow = f"recorded {pace['recorded_per_minute']:g} a minute  trained {pace['trained_per_minute']:g} a minute"
    waits = "" if pace["oldest_ready_s"] is None else f"  oldest ready {pace['oldest_ready_s']:.0f} s"
    console.print(f"pace      {flow}{waits}")
    versions = status["versions"]
    console.print(
        f"versions  newest {versions['newest']}  serving {versions['serving']}  published {versions['published']}  "
        f"reloads {versions['reloads']}  lag {status['lag_versions']}"
    )
    for trainer in status["trainers"]:
        alive = "alive" if trainer["alive"] else "stopped"
        console.print(
            f"trainer   {trainer['name']}  {alive}  step {trainer['step']}  version {trainer['version']}  "
            f"heard of {trainer['heartbeat_age_s']:.0f} s ago"
        )
    return 0


def recompute_rewards(config: Config) -> int:
    """Apply the configured `reward` section to everything said about rows that no trainer holds yet."""
    ledger = Ledger.open(config.ledger_url)
    changed, after = 0, 0
    try:
        while True:
            with ledger.write() as connection:
                now, last = transitions.recompute_rewards(connection, config.reward, after)
            if last is None:
                break
            changed, after = changed + now, last
    finally:
        ledger.close()
    Console().print(f"{changed} rewards changed")
    return 0


def erase(config: Config, **scope: str | None) -> int:
    """Erase what the scope names, and say which versions it went into: those weights have learned from it."""
    if not any(scope.values()):
        raise ConfigError("erase: name whose rows with --key, --task, --run or --message")
    ledger = Ledger.open(config.ledger_url)
    rows, versions, after = 0, set[int](), 0
    try:
        while True:
            with ledger.write() as connection:
                done = transitions.erase(connection, after_id=after, **scope)
            rows += done.rows
            versions |= done.versions
            if done.last_id is None:
                break
            after = done.last_id
    finally:
        ledger.close()
    trained = f"they went into {_ranges(versions)}" if versions else "no version was trained on them"
    Console().print(f"{rows} rows erased; {trained}")
    return 0


def _ranges(numbers: set[int]) -> str:
    """1, 2, 3, 7 → versions 1-3, 7"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "versions " + ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def migrate(config: Config, to: str | None) -> int:
    """Bring the ledger to this schema; with `to`, copy it into an empty database while no one writes, and verify."""
    console = Console()
    source = Ledger.open(config.ledger_url)  # opening brings it to the schema
    try:
        if to is None:
            console.print(f"{source.shown_url} has schema {HEAD}")
            return 0
        target = Ledger.open(ledger_url(to))
        try:
            with Progress(console=console) as bars, source.write() as reading, target.write() as writing:
                tasks: dict[str, TaskID] = {}

                def show(table: str, done: int, total: int) -> None:
                    if table not in tasks:
                        tasks[table] = bars.add_task(table, total=total)
                    bars.update(tasks[table], completed=done)

                copied = copy_ledger(reading, writing, show)
            console.print(f"{sum(copied.values())} rows copied and verified; set database_url to the new database")
        finally:
            target.close()
    finally:
        source.close()
    return 0


def print_versions(config: Config) -> int:
    """Every version and its state."""
    ledger = Ledger.open(config.ledger_url)
    try:
        with ledger.read() as connection:
            rows = list_versions(connection)
    finally:
        ledger.close()
    table = Table("version", "parent", "kind", "state", "step", "published", "in service", "reason")
    for row in rows:
        served = _clock(row.served_at) if row.served_at is not None else ""
        parent = "" if row.parent is None else str(row.parent)
        table.add_row(
            str(row.version),
            parent,
            row.kind,
            row.state,
            str(row.step),
            _clock(row.created_at),
            served,
            row.reason or "",
        )
    Console().print(table)
    return 0


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
