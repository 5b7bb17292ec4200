"""`flywheel export`: writes a part of the ledger as a dataset."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.commands import add_config, open_console, read_config, utf8
from shared.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

HELP = "write recorded conversations with rewards as JSONL or Parquet"


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        type=Path,
        help="the file to write, or to replace; its name ends in .jsonl, .jsonl.gz or .parquet",
    )
    parser.add_argument("--state", default=None, help="only rows in this state, such as CONSUMED")
    parser.add_argument("--min-reward", type=float, default=None, help="only rows with at least this reward")
    parser.add_argument("--task", type=utf8, default=None, help="only rows of this task")
    parser.add_argument(
        "--tokens", action="store_true", help="add token ids, logprobs and signals, for `import` and `train`"
    )


def run(args: Namespace) -> int:
    """Write the rows that the options select. Raises ConfigError and StartupError."""
    config = read_config(args)
    from shared.ledger.connect import Ledger
    from shared.ledger.dataset import conversations
    from shared.ledger.row_files import replace_whole
    from shared.tokenizer import tokenizer_digest
    from shared.versions import version_path

    where = _conditions(args)
    counts = {"written": 0, "without text": 0}
    console = open_console(stderr=True, markup=False)

    def count(rows: Iterator[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(rows, start=1):
            counts["without text" if row is None else "written"] += 1
            if row is not None:
                yield row
            if number % 100_000 == 0:
                console.print(f"{number} rows read")

    with closing(Ledger.open(config.ledger_url, create=False)) as ledger, ledger.read() as connection:
        tokenizer = tokenizer_digest(config.root / version_path(0)) if args.tokens else None
        replace_whole(args.out, count(conversations(connection, where, args.tokens, tokenizer)))
    console.print(f"{counts['written']} rows written to {args.out}; {counts['without text']} without text left out")
    return 0


def _conditions(args: Namespace) -> list[ColumnElement[bool]]:
    """Convert the options to conditions on rows. Raises ConfigError."""
    from shared.experience import State
    from shared.ledger.tables import experiences

    where: list[ColumnElement[bool]] = []
    if args.state is not None:
        if args.state not in list(State):
            raise ConfigError(f"--state {args.state!r}: choose one of {', '.join(State)}")
        where.append(experiences.c.state == args.state)
    if args.min_reward is not None:
        where.append(experiences.c.reward >= args.min_reward)
    if args.task is not None:
        where.append(experiences.c.task_id == args.task)
    return where
