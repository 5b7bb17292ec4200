"""`flywheel import`: records the conversations in a file as if they had been chats."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from services.commands import add_config, open_console, read_config
from shared.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from shared.ledger.connect import Ledger

HELP = "record conversations from a file, with rewards or as demonstrations"
TRANSACTION_ROWS = 100  # few: a chat that continues the same row as an imported one waits for the transaction


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="a file whose name ends in .jsonl, .jsonl.gz or .parquet"
    )
    parser.add_argument(
        "--reward", type=float, default=None, help="reward of rows without one, which otherwise are demonstrations"
    )
    parser.add_argument(
        "--commit",
        action="store_true",
        help="then make all rows of the ledger that an algorithm learns from ready for training, not only the file's",
    )


def run(args: Namespace) -> int:
    """Record the file's rows, except those already in the ledger. Returns 1 if no row was usable."""
    config = read_config(args)
    from services.samples import SampleReader, store
    from shared.experience import MAY_SERVE, VersionState
    from shared.ledger.connect import Ledger
    from shared.ledger.given import require_accepted
    from shared.ledger.queries import count_ready, list_versions
    from shared.ledger.row_files import read_rows

    try:
        require_accepted(args.reward, config.reward)
    except ValueError as exc:
        raise ConfigError(f"--{exc}; give one inside") from exc
    console, learned = open_console(stderr=True, markup=False), config.trainer.learns_from
    counts = {"imported": 0, "known": 0, "unusable": 0}
    rows = read_rows(args.file)
    part = list(islice(rows, TRANSACTION_ROWS))  # if it cannot be read, no new ledger is left
    if not part:
        raise StartupError(f"{args.file} holds no rows; name another file")
    with closing(Ledger.open(config.ledger_url)) as ledger:
        versions = [row for row in ledger.fetch(list_versions) if row.state != VersionState.RESERVED]
        serving = [row.version for row in versions if row.state in MAY_SERVE]
        reader = SampleReader(config, serving, published=[row.version for row in versions])
        while part:
            samples = asyncio.run(reader.read(part))
            with ledger.write() as connection:
                stored = store(connection, samples, rule=config.reward, learned=learned, default_reward=args.reward)
            counts["imported"] += stored
            counts["known"] += len(samples) - stored
            counts["unusable"] += len(part) - len(samples)
            console.print(", ".join(f"{count} {what}" for what, count in counts.items()))
            part = list(islice(rows, TRANSACTION_ROWS))
        for reason in sorted(reader.reasons):
            console.print(f"unusable: {reason}", soft_wrap=True)
        if args.commit:
            committed = _commit(ledger)
            console.print(f"{committed} rows committed, {ledger.fetch(count_ready)} ready")
    return 0 if counts["imported"] or counts["known"] else 1


def _commit(ledger: Ledger) -> int:
    """Commit all rows of the ledger, in parts. Returns the number of rows made READY."""
    from shared.ledger import transitions

    committed = 0
    last_id: int | None = 0
    while last_id is not None:
        with ledger.write() as connection:
            count, last_id = transitions.commit_part(connection, after_id=last_id)
        committed += count
    return committed
