"""`flywheel migrate`: migrates the ledger to this version's schema, or copies it to another database."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from services.commands import add_config, open_console, progress_bars, read_config
from shared.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from shared.ledger.connect import Ledger

HELP = "update the ledger's schema, or copy the ledger to another database"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--to", metavar="URL", default=None, help="copy all rows to this empty database, and compare")
    parser.add_argument("--force", action="store_true", help="with --to: copy although explorers or trainers are live")


def run(args: Namespace) -> int:
    """Migrate the ledger; with --to, copy it while no process writes.

    Raises ConfigError, LedgerError, and StartupError if processes would go on writing to the old database.
    """
    config = read_config(args)
    from shared.config import check_database_url, ledger_url

    if args.to is not None:
        try:
            check_database_url("--to", args.to)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        file = _file_of(config.ledger_url)
        if file is not None and file == _file_of(ledger_url(args.to)):
            raise ConfigError("--to names the ledger that is to be copied; name an empty database")
    from shared.ledger.connect import Ledger
    from shared.ledger.migrate import copy_ledger
    from shared.ledger.migrations import HEAD

    console = open_console()
    with closing(Ledger.open(config.ledger_url, create=args.to is None)) as source:  # opening migrates the schema
        if args.to is None:
            console.print(f"{source.shown_url} has schema {HEAD}")
            return 0
        if not args.force:
            _require_unused(source)
        with (
            closing(Ledger.open(ledger_url(args.to))) as target,
            progress_bars(console) as show,
            source.write() as reading,
            target.write() as writing,
        ):
            copied = copy_ledger(reading, writing, show)
    console.print(f"{sum(copied.values())} rows copied and verified; set database_url to the new database")
    return 0


def _require_unused(source: Ledger) -> None:
    """Raise StartupError if explorers or trainers are live: what they write after the copy would be lost."""
    from shared.ledger.queries import live_explorers, live_trainers

    live = [f"explorer {name}" for name in source.fetch(live_explorers)]
    live += [f"trainer {name}" for name in source.fetch(live_trainers)]
    if live:
        raise StartupError(
            f"{source.shown_url} is in use by {' and '.join(live)}; nothing was copied, because what they write after "
            "the copy would be lost; stop them (a killed one counts as live for half a minute), or add --force"
        )


def _file_of(url: str) -> Path | None:
    """Return SQLite's file; None for PostgreSQL, where a copy into itself finds the rows that are there."""
    from sqlalchemy import make_url

    parsed = make_url(url)
    return Path(parsed.database or "").resolve() if parsed.get_backend_name() == "sqlite" else None
