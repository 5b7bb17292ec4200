"""The time of the queries of GET /status and GET /metrics on a ledger of a million rows."""

from __future__ import annotations

import statistics
import time

from sqlalchemy import text

from benchmarks.ledger.databases import Databases, Figures, tidy
from shared.ledger.connect import Ledger
from shared.ledger.queries import ledger_status, progress

ROWS = 1_000_000
ASKED = 20

_NUMBERS = {
    "sqlite": "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :rows)",
    "postgresql": "WITH numbers AS (SELECT generate_series(1, :rows) AS n)",
}
_FILL = """
INSERT INTO experiences (msg_id, choice, version, version_end, state, n_prompt, n_reply, temperature, top_p, top_k,
                         min_p, created_at)
{numbers} SELECT 'chatcmpl-' || n, 0, 0, 0,
       CASE n % 5 WHEN 0 THEN 'RECORDED' WHEN 1 THEN 'CONSUMED' WHEN 2 THEN 'DISCARDED' ELSE 'READY' END,
       100, 64, 1, 1, 0, 0, :now - 0.001 * (:rows - n)
FROM numbers
"""


def fill(ledger: Ledger, kind: str, rows: int) -> None:
    """Add narrow rows in all states, two of five READY, recorded at a thousand a second until now."""
    with ledger.write() as connection:
        statement = _FILL.format(numbers="" if kind == "postgresql" else _NUMBERS[kind])
        if kind == "postgresql":
            statement = _NUMBERS[kind] + statement
        connection.execute(text(statement), {"rows": rows, "now": time.time()})
    tidy(ledger)


def measure(databases: Databases, kind: str, rows: int = ROWS) -> Figures:
    ledger = databases.open(kind)
    fill(ledger, kind, rows)
    figures: Figures = {"rows": rows}
    for name, query in (("status", ledger_status), ("metrics", progress)):
        times = []
        for _ in range(ASKED):
            with ledger.read() as connection:
                began = time.perf_counter()
                query(connection)
                times.append(1000 * (time.perf_counter() - began))
        figures |= {f"{name}_ms_median": statistics.median(times), f"{name}_ms_slowest": max(times)}
    ledger.close()
    return figures
