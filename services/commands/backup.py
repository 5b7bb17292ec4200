"""`flywheel backup`: copies ledger, versions and states of one moment, while chats and training go on."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from services.commands import add_config, open_console, progress_bars, read_config

HELP = "copy the ledger, the versions and the trainers' states to a new folder"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="the folder to create")


def run(args: Namespace) -> int:
    """Write the folder. Raises ConfigError, StartupError and LedgerError."""
    config = read_config(args)
    from services.backup import back_up

    console = open_console(stderr=True, markup=False)
    with progress_bars(console) as show:
        moment = back_up(config, args.to, show)
    for path in moment.missing:
        console.print(f"warning: {config.root / path} does not exist, and is not in the backup")
    versions = sum(path.startswith("versions/") for path in moment.folders)
    states = len(moment.folders) - versions
    console.print(f"{args.to} has {moment.rows} rows, {versions} versions and {states} states")
    return 0
