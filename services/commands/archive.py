"""`flywheel archive`: moves rows that need no more training to files; `flywheel import` records them again."""

from __future__ import annotations

import math
import time
from argparse import ArgumentParser, Namespace
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from services.commands import add_config, open_console, read_config
from shared.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.ledger.connect import Ledger

HELP = "move old rows that were trained on or discarded into files"
FILE_ROWS = 10_000  # maximum in one file
AT_ONCE = 1000  # rows that one transaction deletes, so that it does not block writers for long


def add_arguments(parser: ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--to", required=True, metavar="FOLDER", type=Path, help="folder for the files")
    parser.add_argument("--older-than-days", type=float, default=None, metavar="DAYS", help="move rows older than this")
    parser.add_argument(
        "--keep-gb", type=float, default=None, metavar="GB", help="move rows until the ledger is this small"
    )


def run(args: Namespace) -> int:
    """Move rows to files, oldest first. Raises ConfigError without a bound, StartupError without a folder."""
    config = read_config(args)
    _check(args)
    from shared.ledger.connect import Ledger
    from shared.tokenizer import tokenizer_digest
    from shared.versions import version_path

    console = open_console(stderr=True, markup=False)
    moved, tokenizer = 0, tokenizer_digest(config.root / version_path(0))
    with closing(Ledger.open(config.ledger_url, create=False)) as ledger:
        try:
            args.to.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(args.to)
            for file, rows in _move(ledger, args.to, tokenizer, args.older_than_days, args.keep_gb):
                moved += rows
                console.print(f"{moved} rows archived; {file}")
        except OSError as exc:
            raise StartupError(f"{args.to} cannot be written ({exc.strerror}); name another folder") from exc
    console.print(f"{moved} rows moved to {args.to}")
    return 0


def _check(args: Namespace) -> None:
    bounds = {"--older-than-days": args.older_than_days, "--keep-gb": args.keep_gb}
    given = {option: value for option, value in bounds.items() if value is not None}
    if not given:
        raise ConfigError("archive: choose the rows with --older-than-days or --keep-gb")
    for option, value in given.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{option} {value:g} is no such amount; give a number of at least 0")


def _move(
    ledger: Ledger, folder: Path, tokenizer: str | None, older_than_days: float | None, keep_gb: float | None
) -> Iterator[tuple[Path, int]]:
    """Write a file, then delete its rows, until no row is left to move. Yields each file and its number of rows.

    tokenizer: digest of what the token ids mean.

    A file is durable before its rows leave the ledger. A crash between the two leaves rows in both, and an import of
    the file skips them. A row that gets signals meanwhile stays, is taken out of the file again, and goes into a later
    one with them. So is a row that another archive has removed.
    """
    from shared.ledger.conditions import is_done
    from shared.ledger.dataset import conversations
    from shared.ledger.queries import count_signals, names_of_rows, oldest_done
    from shared.ledger.row_files import replace_whole
    from shared.ledger.tables import experiences

    before = None if older_than_days is None else time.time() - 86400 * older_than_days
    left = None if keep_gb is None else _rows_over(ledger, keep_gb)
    while left is None or left > 0:
        at_most = FILE_ROWS if left is None else min(left, FILE_ROWS)
        with ledger.read() as connection:
            ids = oldest_done(connection, before=before, at_most=at_most)
            if not ids:
                return
            file = _new_file(folder, f"rows-{ids[0]:012}-{ids[-1]:012}")
            in_file = [experiences.c.id.between(ids[0], ids[-1]), *is_done(before)]
            rows = conversations(connection, in_file, with_tokens=True, tokenizer=tokenizer)
            said, names = count_signals(connection, ids), names_of_rows(connection, ids)
            try:
                replace_whole(file, (row for row in rows if row is not None))
            except BaseException:
                file.unlink()
                raise
        left = None if left is None else left - len(ids)
        parts = (_remove(ledger, ids[start : start + AT_ONCE], said) for start in range(0, len(ids), AT_ONCE))
        removed = {names[row_id] for part in parts for row_id in part}
        if len(removed) < len(ids):
            _keep_only(removed, file)
        if removed:
            yield file, len(removed)


def _remove(ledger: Ledger, ids: list[int], said: dict[int, int]) -> list[int]:
    from shared.ledger import transitions

    with ledger.write() as connection:
        return transitions.remove(connection, ids, said)


def _keep_only(names: set[tuple[str, int]], file: Path) -> None:
    """Leave only these rows in a file, and delete the file if there are none."""
    from shared.ledger.row_files import read_rows, replace_whole

    if names:
        replace_whole(file, (row for row in read_rows(file) if (row["msg_id"], row["choice"]) in names))
    else:
        file.unlink()


def _new_file(folder: Path, name: str) -> Path:
    """Create an empty file with an unused name: another ledger has rows with the same ids, and SQLite reuses ids."""
    for number in count(1):
        file = folder / f"{name}{f'-{number}' if number > 1 else ''}.jsonl.gz"
        with suppress(FileExistsError):
            file.touch(exist_ok=False)  # another archive may run
            break
    return file


def _remove_left_behind(folder: Path) -> None:
    """Delete what killed archives left: temporary files, and the empty files that reserved their names."""
    from shared.ledger.row_files import remove_left_behind

    for file in (folder / name for name in remove_left_behind(folder)):
        if file.exists() and file.stat().st_size == 0:
            file.unlink()


def _rows_over(ledger: Ledger, keep_gb: float) -> int:
    """Return the number of rows of mean size by which the ledger exceeds `keep_gb`."""
    from shared.ledger.queries import count_by_state, size_bytes

    with ledger.read() as connection:
        size, rows = size_bytes(connection), sum(count_by_state(connection).values())
    most = keep_gb * 1e9
    return round((size - most) / size * rows) if size > most else 0
