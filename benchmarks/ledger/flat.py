"""p99 of record, feedback, claim and publish with many rows, relative to 10,000 rows; alternating."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.ledger.databases import SMALL, Databases, Figures, fill, make_sample
from shared.config import RewardConfig
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from shared.reward import Signal


class Paces:
    """Latencies of each step on one ledger, in seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.took: dict[str, list[float]] = {}
        self._version = 0

    def _step(self, name: str, work: Callable[[Any], Any]) -> Any:
        started = time.perf_counter()
        with self.ledger.write() as connection:
            result = work(connection)
        self.took.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def chat_and_rate(self) -> None:
        sample = make_sample(32, 16)
        said = [Signal("reward", value=1.0)]
        self._step("record", lambda c: transitions.record(c, [sample]))
        self._step(
            "feedback",
            lambda c: transitions.apply_feedback(
                c, msg_ids=[sample.msg_id], task_id=None, run_id=None, signals=said, rule=RewardConfig()
            ),
        )

    def commit(self) -> None:
        self._step("commit", transitions.commit)

    def train(self, rows: int) -> None:
        claim = {"owner": "t", "at_least": rows, "at_most": rows, "lease_s": 60.0}
        batch = self._step("claim", lambda c: transitions.claim(c, **claim))
        assert batch is not None
        self._version += 1
        about = {"version": self._version, "parent": None, "kind": "full", "step": self._version, "trainer": "t"}
        self._step("publish", lambda c: transitions.publish(c, **about, batch_ids=[batch]))


def measure(databases: Databases, kind: str, rows: int, rounds: int = 800) -> dict[str, Any]:
    paces = []
    for count in (SMALL, rows):
        ledger = databases.open(kind)
        fill(ledger, count)
        paces.append(Paces(ledger))
    for _ in range(rounds):
        for _ in range(8):
            for pace in paces:  # alternating: other load on disk and machine affects both
                pace.chat_and_rate()
        for pace in paces:
            pace.commit()
        for _ in range(2):
            for pace in paces:
                pace.train(4)
    for pace in paces:
        pace.ledger.close()
    small, large = (pace.took for pace in paces)
    return {name: _compare(small[name], large[name]) for name in small}


def _compare(small: list[float], large: list[float]) -> Figures:
    p50, p99 = ((_percentile(small, part), _percentile(large, part)) for part in (0.5, 0.99))
    return {
        "p50_ms_small": 1000 * p50[0],
        "p50_ms_large": 1000 * p50[1],
        "p99_ms_small": 1000 * p99[0],
        "p99_ms_large": 1000 * p99[1],
        "p50_ratio": p50[1] / p50[0],
        "p99_ratio": p99[1] / p99[0],
    }


def _percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]
