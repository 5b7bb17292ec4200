"""`flywheel train`: trains on an export, without an explorer and without engines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from services.commands import add_config, read_config
from shared.errors import ConfigError

HELP = "train on an export, to write a model folder or the next version of root_dir"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--from", required=True, dest="file", metavar="FILE", type=Path, help="a file that `export --tokens` wrote"
    )
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="passes over the file (default: 1)")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder to create for the trained model (default: publish a version)",
    )


def run(args: Namespace) -> int:
    """Train from model.path into --out, or from the trainer's state into root_dir. Raises ConfigError."""
    config = read_config(args)
    if args.epochs < 1:
        raise ConfigError(f"--epochs {args.epochs} is not at least 1; leave it out for one pass over the file")
    from services.offline import train_into_folder, train_next_version

    if args.out is not None:
        return train_into_folder(config, args.file, args.epochs, args.out)
    return train_next_version(config, args.file, args.epochs)
