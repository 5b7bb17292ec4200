"""The commands of `flywheel`, one module each: HELP, `add_arguments(parser)` and `run(args)`.

`run` returns the exit status: 0 done, 1 cannot run. `flywheel --help` imports every module here, so none of them
imports heavy packages before `run` has read the configuration.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from shared.config import Config


_WIDE = 1_000_000  # columns


def add_config(parser: ArgumentParser) -> None:
    """Add the option for the configuration file."""
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the configuration file")


def utf8(text: str) -> str:
    """The type of an option that names something in the ledger. Raises ArgumentTypeError."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ArgumentTypeError(f"{text!r} is not UTF-8; write it as it was recorded") from exc
    return text


def read_config(args: Namespace) -> Config:
    """Read and check the whole configuration. Raises ConfigError."""
    from shared.config import load_config

    return load_config(args.config)


def open_console(*, stderr: bool = False, markup: bool = True) -> Console:
    """Return the console of a command. A pipe or a file gets no width limit, so that no line is cut or wrapped."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, markup=markup, width=None if is_terminal else _WIDE)


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of (what, units done, all units) that shows a bar for each thing."""
    from rich.progress import Progress, TaskID

    with Progress(console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show
