"""`flywheel versions`: shows all versions and their states, and changes one of them for an operator."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from contextlib import closing
from typing import TYPE_CHECKING

from services.commands import add_config, open_console, read_config, utf8
from shared.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from shared.ledger.connect import Ledger

HELP = "list all versions and their states; retry, tag or untag one"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "action",
        nargs="?",
        choices=["retry", "tag", "untag"],
        help="let engines try a FAILED version again; name a version and keep its files; remove the name",
    )
    parser.add_argument("version", nargs="?", type=int, metavar="N", help="the version")
    parser.add_argument("name", nargs="?", type=utf8, metavar="NAME", help="the name that tag gives")


def run(args: Namespace) -> int:
    """Run an action. Raises ConfigError for an incomplete call, StartupError if it does not apply to the version."""
    config = read_config(args)
    if args.action is not None and args.version is None:
        raise ConfigError(f"versions {args.action}: say which version, such as `versions {args.action} 13`")
    if args.action == "tag" and not args.name:
        raise ConfigError(f"versions tag {args.version}: give it a name, such as `versions tag {args.version} best`")
    if args.action != "tag" and args.name is not None:
        raise ConfigError(f"versions {args.action} {args.version}: it takes no name; leave {args.name!r} out")
    from shared.ledger.connect import Ledger

    _require_fitting(args.action, args.version, args.name)
    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        if args.action is None:
            _show(ledger)
        else:
            _apply(ledger, args.action, args.version, args.name)
    return 0


def _require_fitting(action: str, version: int | None, name: str | None) -> None:
    """Raise ConfigError for a number or a tag that does not fit the ledger's columns."""
    from shared.ledger.tables import versions
    from shared.versions import LARGEST_VERSION

    if version is not None and not 0 <= version <= LARGEST_VERSION:
        raise ConfigError(f"versions {action} {version}: there is no such version; see `flywheel versions`")
    most = versions.c.tag.type.length  # type: ignore[attr-defined]
    if name is not None and len(name) > most:
        raise ConfigError(f"versions tag {version}: the name has {len(name)} characters; give it at most {most}")


def _apply(ledger: Ledger, action: str, version: int, name: str | None) -> None:
    from shared.ledger import transitions
    from shared.ledger.queries import find_versions

    with ledger.write() as connection:
        if not find_versions(connection, [version]):
            raise StartupError(f"version {version} does not exist; see `flywheel versions`")
        if action == "retry":
            done = transitions.retry_version(connection, version, by="operator")
            reason = "has not failed, or its files are gone"
        elif action == "tag":
            done = transitions.tag_version(connection, version, name or "")
            reason = "is not published yet, or its files are gone"
        else:
            done, reason = transitions.untag_version(connection, version), "has no tag"
    if not done:
        raise StartupError(f"version {version} {reason}; see `flywheel versions`")


def _show(ledger: Ledger) -> None:
    from rich.table import Table
    from rich.text import Text

    from shared.ledger.queries import list_versions

    rows = ledger.fetch(list_versions)
    table = Table("version", "parent", "kind", "step")
    table.add_column("state", no_wrap=True)
    for name in ("since", "published", "in service", "remarks"):
        table.add_column(name)
    for row in rows:
        parent = "" if row.parent is None else str(row.parent)
        times = (_local_time(moment) for moment in (row.decided_at, row.created_at, row.served_at))
        share = "" if row.share is None else f"share {100 * row.share:.4g}%"
        remarks = [share, f"tag {row.tag}" if row.tag else "", "files gone" if row.deleted_at else "", row.reason or ""]
        about = (str(row.version), parent, row.kind, str(row.step), row.state)
        table.add_row(*map(Text, (*about, *times, "; ".join(filter(None, remarks)))))
    open_console().print(table)


def _local_time(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
