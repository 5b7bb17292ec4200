"""`flywheel export-model`: writes a version as a folder for Transformers or PEFT."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from services.commands import add_config, open_console, read_config

HELP = "write a version as a model folder, or as an adapter in PEFT's format"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--version", required=True, type=int, metavar="N", help="the version")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder to create")
    parser.add_argument("--merged", action="store_true", help="add the adapter to the base model's weights")


def run(args: Namespace) -> int:
    """Write the folder. Raises ConfigError and StartupError."""
    config = read_config(args)
    from services.export_model import export_model

    gap = export_model(config, args.version, args.to, merged=args.merged)
    open_console(stderr=True, markup=False).print(
        f"version {args.version} is in {args.to}; its probe, computed from there, is off by at most {gap.largest:.2g}"
    )
    return 0
