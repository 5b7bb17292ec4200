"""Durable records a second, 64 writers of single chats.

Compared with all rows by executemany in one transaction, and with Trinity-RFT's recorder on the same disk (--peers: see
front_door, and asyncpg).
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.ledger.databases import N_PROMPT, N_REPLY, WRITERS, Databases, Figures, make_sample
from explorer_service.background import Background
from explorer_service.chat.conversation import DIGEST_BYTES
from explorer_service.ledger_writer import LedgerWriter
from explorer_service.metrics import ExplorerMetrics
from shared.experience import new_message_id
from shared.ledger import transitions
from shared.ledger.connect import Ledger

REPOSITORY = Path(__file__).parents[2]


def measure(databases: Databases, kind: str, peers: str | None, seconds: int = 5, turns: int = 3) -> Figures:
    """Medians of alternating turns, so that other load on disk and machine affects both. The peer comes last."""
    records, rows_at_once = [], []
    with closing(databases.open(kind)) as ledger:  # not counted: a new PostgreSQL first creates the files of its log
        asyncio.run(_write_with_64(ledger, seconds))
    for _ in range(turns):
        os.sync()  # complete the writes of creating the database
        with closing(databases.open(kind)) as ledger:
            records.append(asyncio.run(_write_with_64(ledger, seconds)))
        with closing(databases.open(kind)) as ledger:
            rows_at_once.append(_write_at_once(ledger, 20_000))
    result = {"records_per_s": statistics.median(records), "one_transaction_per_s": statistics.median(rows_at_once)}
    result["of_one_transaction"] = result["records_per_s"] / result["one_transaction_per_s"]
    if peers:
        module = [peers, "-m", "benchmarks.peers.trinity_recorder", databases.url(kind)]
        numbers = [str(number) for number in (WRITERS, 2 * seconds, N_PROMPT, N_REPLY)]
        ended = subprocess.run([*module, *numbers], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"the peer's recorder failed: {ended.stderr[-2000:]}")
        result["trinity_per_s"] = float(ended.stdout.split()[-1])
        result["times_trinity"] = result["records_per_s"] / result["trinity_per_s"]
    return result


def _write_at_once(ledger: Ledger, rows: int) -> float:
    """Rows a second by executemany in one transaction."""
    samples = [make_sample() for _ in range(rows)]
    started = time.perf_counter()
    with patch("shared.ledger.transitions.record._COPY_ROWS", math.inf), ledger.write() as connection:
        transitions.record(connection, samples)
    return rows / (time.perf_counter() - started)


async def _write_with_64(ledger: Ledger, seconds: float) -> float:
    writer = LedgerWriter(ledger, ExplorerMetrics(), Background())
    sample = make_sample()  # its tokens are those of all rows
    stored = 0

    async def writing() -> None:
        nonlocal stored
        while time.perf_counter() < until:
            about: dict[str, Any] = {"msg_id": new_message_id("chatcmpl-"), "exchange": os.urandom(DIGEST_BYTES)}
            await writer.record([replace(sample, **about)])
            stored += 1

    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(writing() for _ in range(WRITERS)))
    took = time.perf_counter() - started
    await writer.stop()
    return stored / took
