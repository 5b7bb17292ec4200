"""Bytes of an experience, including indexes."""

from __future__ import annotations

from benchmarks.ledger.databases import N_PROMPT, N_REPLY, Databases, Figures, make_sample, size_of, tidy
from shared.ledger import transitions


def measure(databases: Databases, kind: str, rows: int = 20_000) -> Figures:
    raw = 4 * (N_PROMPT + 2 * N_REPLY)
    texts = {"request": b"x" * 900, "reply": b"y" * 300}
    sizes = []
    for more in ({}, texts):
        ledger = databases.open(kind)
        for _ in range(rows // 500):
            with ledger.write() as connection:
                transitions.record(connection, [make_sample(**more) for _ in range(500)])
        tidy(ledger)
        sizes.append(size_of(ledger) / rows)
        ledger.close()
    return {
        "raw_arrays": raw,
        "bytes_without_text": sizes[0],
        "bytes_allowed": 1.1 * raw + 200,
        "bytes_of_1200_of_text": sizes[1] - sizes[0],
    }
