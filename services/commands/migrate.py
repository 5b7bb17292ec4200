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

_OTHER_SOURCE = (
    "let database_url name the ledger to copy (that of a backup: "
    "FLYWHEEL_DATABASE_URL=sqlite:////BACKUP/ledger.sqlite3)"
)
HELP = "update the ledger's schema, or copy the ledger to another database"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--to", metavar="URL", default=None, help="copy all rows to this empty database, and compare")
    parser.add_argument("--force", action="store_true", help="with --to: copy although explorers or trainers are live")


def run(args: Namespace) -> int:
    """Migrate the ledger; with --to, copy it while no process writes.

    Raises ConfigError, LedgerError, and StartupError if processes would go on writing to the old database, or if it
    holds no rows.
    """
    config = read_config(args)
    from shared.config import check_database_url

    if args.to is not None:
        try:
            check_database_url("--to", args.to)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        if names_same_database(config.ledger_url, args.to):
            raise ConfigError(f"--to names the ledger that is to be copied; name an empty database, or {_OTHER_SOURCE}")
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
            closing(Ledger.open(_absolute(args.to))) as target,
            progress_bars(console) as show,
            source.write() as reading,
            target.write() as writing,
        ):
            copied = copy_ledger(reading, writing, show)
        if not any(copied.values()):
            raise StartupError(f"{source.shown_url} holds no rows, so nothing was copied; {_OTHER_SOURCE}")
    done = f"{sum(copied.values())} rows copied and verified; set database_url to {target.shown_url}"
    console.print(done, soft_wrap=True)
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


def names_same_database(one: str, other: str) -> bool:
    """Whether two URLs name one database, whatever user and options they give. Other names of a host are not known."""
    return _place_of(one) == _place_of(other)


def _absolute(url: str) -> str:
    """Return SQLAlchemy's form of a URL, with the whole path of SQLite's file, as database_url needs it elsewhere."""
    from sqlalchemy import make_url

    from shared.config import ledger_url

    parsed = make_url(ledger_url(url))
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        parsed = parsed.set(database=str(Path(parsed.database).absolute()))
    return parsed.render_as_string(hide_password=False)


def _place_of(url: str) -> tuple[str, ...]:
    """Return SQLite's file, or PostgreSQL's host, port and database."""
    from sqlalchemy import make_url

    from shared.config import is_loopback, ledger_url

    parsed = make_url(ledger_url(url))
    if parsed.get_backend_name() == "sqlite":
        return (str(Path(parsed.database or "").resolve()),)
    options = {name: values[-1] for name, values in parsed.normalized_query.items()}  # these take precedence
    host = options.get("host", parsed.host or "").lower()
    port = options.get("port", str(parsed.port or 5432))
    database = options.get("dbname", parsed.database or parsed.username or "")
    return "localhost" if is_loopback(host) else host, port, database
