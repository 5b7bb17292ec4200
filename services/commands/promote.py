"""`flywheel promote`: one version gets all chats that name no version, until an operator decides otherwise."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from services.commands import add_config, read_config
from services.commands.traffic import share

HELP = "send all chats to one version; later ones wait until they are promoted"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("version", type=int, metavar="N", help="the version")


def run(args: Namespace) -> int:
    """Promote a version. Raises CannotServe."""
    share(read_config(args), {args.version: 1.0})
    return 0
