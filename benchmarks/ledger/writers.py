"""Several processes that write to one ledger without a pause: writes a second, and the longest wait for a write.

On SQLite with the queue of writers, then without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

from benchmarks.ledger.databases import Databases, make_sample
from shared.errors import LedgerError
from shared.ledger import transitions
from shared.ledger.connect import DedicatedConnection, Ledger
from shared.ledger.driver import answering_within
from shared.process import die_with_parent

_NUMBERS = (1, 2, 4)  # of processes
_SECONDS = 10.0
_CHATS = 8  # of a write
_TIMEOUT_S = 4.0  # explorer.ledger_timeout_s


def measure(databases: Databases, kind: str) -> dict[str, Any]:
    ways = ("queue", "no_queue") if kind == "sqlite" else ("database",)
    return {way: {number: _beside(databases, kind, number, way) for number in _NUMBERS} for way in ways}


def _beside(databases: Databases, kind: str, number: int, way: str) -> dict[str, float]:
    with closing(databases.open(kind)) as ledger:
        url = ledger._engine.url.render_as_string(hide_password=False)
        command = [sys.executable, "-m", "benchmarks.ledger.writers", url, way]
        processes = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 — one prctl call, no lock
            )
            for _ in range(number)
        ]
        found = [json.loads(process.communicate()[0]) for process in processes]
    return {
        "writes_per_s": sum(one["writes"] for one in found) / _SECONDS,
        "longest_ms": max(one["longest_ms"] for one in found),
        "failed": sum(one["failed"] for one in found),
    }


def _write(url: str, way: str) -> None:
    ledger = Ledger.open(url, answering_within(_TIMEOUT_S), create=False)
    if way == "no_queue":
        ledger._queued = lambda _: nullcontext()  # type: ignore[method-assign]
    writes, failed, longest_s, samples = 0, 0, 0.0, [make_sample() for _ in range(_CHATS)]
    with closing(ledger), closing(DedicatedConnection(ledger)) as dedicated:
        end = time.monotonic() + _SECONDS
        while (began := time.monotonic()) < end:
            samples = [make_sample() for _ in samples]
            try:
                dedicated.write(partial(transitions.record, samples=samples))
            except LedgerError:
                failed += 1
            else:
                writes += 1
            longest_s = max(longest_s, time.monotonic() - began)
    print(json.dumps({"writes": writes, "failed": failed, "longest_ms": 1000 * longest_s}))


if __name__ == "__main__":
    _write(*sys.argv[1:])
