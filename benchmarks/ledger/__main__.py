"""`python -m benchmarks.ledger`: see __init__.py."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.ledger
from benchmarks.ledger import conversations, flat, record, size, snapshot, status, transaction, writers
from benchmarks.ledger.databases import KINDS, Databases

PARTS = ("record", "transaction", "flat", "snapshot", "size", "conversations", "status", "writers")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.ledger.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hold-s", type=float, default=180.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the processes that it started
    with tempfile.TemporaryDirectory(prefix="flywheel-ledger-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's server runs as another user
        databases = Databases(folder)
        try:
            report = {part: _measure(part, databases, args) for part in args.only}
        finally:
            databases.stop()
    print(json.dumps(report, default=float))


def _measure(part: str, databases: Databases, args: argparse.Namespace) -> dict[str, Any]:
    print(part, file=sys.stderr)
    if part == "snapshot":
        return dict(snapshot.measure(databases, args.hold_s))
    measures = {
        "record": lambda kind: record.measure(databases, kind, args.peers),
        "transaction": lambda kind: transaction.measure(databases, kind),
        "flat": lambda kind: flat.measure(databases, kind, args.rows),
        "size": lambda kind: size.measure(databases, kind),
        "conversations": lambda kind: conversations.measure(databases, kind),
        "status": lambda kind: status.measure(databases, kind, args.rows),
        "writers": lambda kind: writers.measure(databases, kind),
    }
    return {kind: measures[part](kind) for kind in KINDS}


if __name__ == "__main__":
    main()
