"""`flywheel explorer`: the service that agents talk to."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path

from services.commands import add_config, read_config

HELP = "start the explorer, the service that agents call"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--worker", action="store_true", help=SUPPRESS)  # internal: one of explorer.workers


def run(args: Namespace) -> int:
    config = read_config(args)
    from services.explorer import run_explorer

    return run_explorer(config, Path(args.config), is_worker=args.worker)
