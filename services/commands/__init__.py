"""The commands of `flywheel`, one module each: HELP, `add_arguments(parser)` and `run(args)`.

`run` returns the exit status: 0 done, 1 cannot run. `flywheel --help` imports every module here, so that none of them
imports anything heavy before `run` has read the configuration.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.config import Config


def add_config(parser: ArgumentParser) -> None:
    """The option that names the configuration file."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file")


def utf8(text: str) -> str:
    """The type of an option that names something in the ledger. Raises ArgumentTypeError."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ArgumentTypeError(f"{text!r} is not UTF-8; write it as it was recorded") from exc
    return text


def read_config(args: Namespace) -> Config:
    """The configuration, checked as a whole. Raises ConfigError."""
    from shared.config import load_config

    return load_config(args.config)
