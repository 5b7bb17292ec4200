"""`flywheel engine`: one vLLM engine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from services.commands import add_config, read_config

HELP = "start one vLLM engine"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--name", default=None, help="its name in explorer.engines (default: the only one)")


def run(args: Namespace) -> int:
    config = read_config(args)
    from services.engine.launch import run_engine

    return run_engine(config, args.name)
