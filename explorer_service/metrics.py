"""Metrics, named `flywheel_<stage>_<what>_<unit>`. One object holds them; nothing is registered globally.

With `explorer.workers` the processes share their counts through the folder PROMETHEUS_MULTIPROC_DIR, so that any
of them answers for all.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from explorer_service.ledger_reader import LedgerReader
from shared.errors import LedgerError
from shared.ledger.queries import Tripped, progress

_KEEP_S = 1.0  # how old the text may be, and how long it waits for the ledger

_NO_VERSION = -1

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ExplorerMetrics:
    """What the explorer counts; docs/metrics.md explains each."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.chat_requests = self._counter("chat_requests", "Chats by HTTP status", "status")
        self.chat_latency = self._histogram("chat_latency_seconds", "Whole chat, engine included")
        self.chat_engine = self._histogram("chat_engine_seconds", "The engine's part of a chat")
        self.chat_added = self._histogram("chat_added_seconds", "A plain chat without the engine's part")
        self.chat_first_token = self._histogram("chat_first_token_seconds", "Until a stream's first event")
        self.chat_in_flight = self._gauge("chat_in_flight_requests", "Chats at engines now", "livesum")
        self.record_rows = self._counter("record_rows", "Samples stored, by result", "result")
        self.record_commit = self._histogram("record_commit_seconds", "One durable write of the ledger")
        self.feedback_receipts = self._counter("feedback_receipts", "Receipts by state", "state")
        self.pins = self._counter("traffic_pins", "Pinned versions brought to an engine, by result", "result")
        self.commit_rows = self._counter("commit_rows", "Rows made ready, by requests and from the clock")
        self.reloads = self._counter("reload_versions", "Versions loaded, by result", "result")
        self.reload_pause = self._histogram("reload_pause_seconds", "How long an engine was paused for a reload")
        self.reload_gap = self._histogram("reload_gap_seconds", "How long a reload held up what was in flight")
        self.reload_stage = self._histogram("reload_stage_seconds", "Bringing a version to its engine")
        self.reload_proof = self._histogram("reload_proof_seconds", "Scoring a probe after a load")
        self.reload_failures = self._counter("reload_failures", "Versions not taken up, by reason", "reason")
        self.engine_up = self._gauge("engine_up", "Whether an engine gets chats", "livemin", "engine")
        self.reload_version = self._gauge("reload_version_number", "Version in service", "livemax", "engine")
        # read from the ledger for each scrape
        self.claim_ready = self._gauge("claim_ready_rows", "Rows that wait for a trainer")
        self.update_step = self._gauge("update_step_number", "Updates in the trainer's saved state")
        self.update_tripped = self._gauge(
            "update_tripped_trainers", "Trainers whose breaker holds", "livemostrecent", "figure", "fix"
        )
        self.publish_version = self._gauge("publish_version_number", "Newest version published")
        self.reload_lag = self._gauge("reload_lag_versions", "Newest version less the one in service")

        self._answered: dict[int, Any] = {}
        self._recorded = self.record_rows.labels("recorded")  # a lookup by label costs more than counting

    def count_answer(self, status: int, seconds: float) -> None:
        """A chat was answered: its HTTP status, and how long that took."""
        self.chat_latency.observe(seconds)
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self.chat_requests.labels(str(status))
        counter.inc()

    def count_recorded(self, rows: int, quarantined: int) -> None:
        """Samples were stored, some of them as quarantined."""
        self._recorded.inc(rows - quarantined)
        if quarantined:
            self.record_rows.labels("quarantined").inc(quarantined)

    def note_engine(self, name: str, version: int | None, *, is_open: bool) -> None:
        """An engine gets chats, or none; version: that it serves, if any. (A label's series cannot be taken back.)"""
        self.engine_up.labels(name).set(is_open)
        self.reload_version.labels(name).set(_NO_VERSION if version is None else version)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"flywheel_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, workers: str = "livemostrecent", *labels: str) -> Gauge:
        """workers: how the values of several processes become one."""
        return Gauge(f"flywheel_{name}", meaning, labels, registry=self.registry, multiprocess_mode=workers)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"flywheel_{name}", meaning, buckets=_LATENCY_S, registry=self.registry)

    def render(self) -> bytes:
        """Prometheus text."""
        registry = self.registry
        if (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is not None:
            _forget_the_dead(Path(folder))
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        text: bytes = generate_latest(registry)
        return text


def _forget_the_dead(folder: Path) -> None:
    """Delete the gauges of workers that have ended. What they counted stays."""
    for file in folder.glob("gauge_live*.db"):
        try:
            os.kill(int(file.stem.rpartition("_")[2]), 0)
        except PermissionError:
            continue  # a process of another user has the number now
        except ProcessLookupError:
            file.unlink(missing_ok=True)  # another worker may do the same


class MetricsText:
    """The text of GET /metrics, made at most once a second, whoever asks."""

    def __init__(self, reader: LedgerReader, metrics: ExplorerMetrics) -> None:
        self._reader = reader
        self._metrics = metrics
        self._text = b""
        self._made_at = -math.inf  # time.monotonic()
        self._tripped: set[Tripped] = set()  # what has tripped a breaker
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        """While the ledger is unavailable the gauges that are read from it have their last values."""
        if time.monotonic() - self._made_at >= _KEEP_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="metrics")
            await asyncio.wait([self._asking], timeout=_KEEP_S)
            self._made_at, self._text = time.monotonic(), self._metrics.render()
        return self._text

    async def _ask(self) -> None:
        try:
            now = await self._reader.read(progress)
        except LedgerError:
            return
        self._metrics.claim_ready.set(now.ready)
        self._metrics.update_step.set(now.step)
        self._tripped |= set(now.tripped)
        for one in self._tripped:
            self._metrics.update_tripped.labels(*one).set(now.tripped.count(one))
        self._metrics.publish_version.set(now.newest)
        self._metrics.reload_lag.set(now.lag)
