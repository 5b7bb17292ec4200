"""Metrics, named `flywheel_<stage>_<what>_<unit>`. One object owns them; nothing is registered globally.

With `explorer.workers`, the processes share their values through the folder PROMETHEUS_MULTIPROC_DIR, so that each of
them can answer for all.
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

_MAX_AGE_S = 1.0  # of the text; also the longest wait for the ledger

_NO_VERSION = -1
_TRIPPED = "flywheel_update_tripped_trainers"

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ExplorerMetrics:
    """The explorer's metrics; docs/metrics.md explains each."""

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
        self.pins = self._counter(
            "traffic_pins", "Versions with pins or shares loaded into an engine, by result", "result"
        )
        self.commit_rows = self._counter("commit_rows", "Rows made ready, by requests and by the timer")
        self.reloads = self._counter("reload_versions", "Results of take-ups", "result")
        self.reload_pause = self._histogram("reload_pause_seconds", "How long an engine was paused for a reload")
        self.reload_gap = self._histogram("reload_gap_seconds", "How long a reload delayed requests in flight")
        self.reload_stage = self._histogram("reload_stage_seconds", "Staging a version for its engine")
        self.reload_proof = self._histogram("reload_proof_seconds", "Scoring a probe after a load")
        self.reload_failures = self._counter("reload_failures", "Failed take-ups, by reason", "reason")
        self.engine_up = self._gauge("engine_up", "Whether an engine gets chats", "livemin", "engine")
        self.reload_version = self._gauge("reload_version_number", "Version in service", "livemax", "engine")
        # read from the ledger for each scrape
        self.claim_ready = self._gauge("claim_ready_rows", "Rows waiting for a trainer")
        self.update_step = self._gauge("update_step_number", "Updates in the trainer's saved state")
        self.update_tripped = self._gauge(
            "update_tripped_trainers", "Trainers whose breaker holds", "livemostrecent", "figure", "fix"
        )
        self.publish_version = self._gauge("publish_version_number", "Newest version published")
        self.reload_lag = self._gauge("reload_lag_versions", "Newest version minus the one in service")

        self._answered: dict[int, Any] = {}
        self._recorded = self.record_rows.labels("recorded")  # a lookup by label costs more than the increment

    def count_answer(self, status: int, seconds: float) -> None:
        """Count an answered chat: its HTTP status and duration."""
        self.chat_latency.observe(seconds)
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self.chat_requests.labels(str(status))
        counter.inc()

    def count_recorded(self, rows: int, quarantined: int) -> None:
        """Count stored samples. quarantined: how many of them are quarantined."""
        self._recorded.inc(rows - quarantined)
        if quarantined:
            self.record_rows.labels("quarantined").inc(quarantined)

    def note_engine(self, name: str, version: int | None, *, is_open: bool) -> None:
        """Set whether an engine gets chats, and which version it serves. (A label's series cannot be removed.)"""
        self.engine_up.labels(name).set(is_open)
        self.reload_version.labels(name).set(_NO_VERSION if version is None else version)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"flywheel_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, workers: str = "livemostrecent", *labels: str) -> Gauge:
        """workers: how the values of several processes are combined."""
        return Gauge(f"flywheel_{name}", meaning, labels, registry=self.registry, multiprocess_mode=workers)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"flywheel_{name}", meaning, buckets=_LATENCY_S, registry=self.registry)

    def render(self) -> bytes:
        """Return Prometheus text."""
        text: bytes = generate_latest(self._of_all_workers())
        return text

    def shown_tripped(self) -> set[Tripped]:
        """Return the labels that `update_tripped` has in any worker."""
        families = (family for family in self._of_all_workers().collect() if family.name == _TRIPPED)
        labels = (sample.labels for family in families for sample in family.samples)
        return {Tripped(one["figure"], one["fix"]) for one in labels}

    def _of_all_workers(self) -> CollectorRegistry:
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder is None:
            return self.registry
        _delete_stale_gauges(Path(folder))
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return registry


def _delete_stale_gauges(folder: Path) -> None:
    """Delete the gauges of workers that have ended; keep their counters."""
    for file in folder.glob("gauge_live*.db"):
        try:
            os.kill(int(file.stem.rpartition("_")[2]), 0)
        except PermissionError:
            continue  # a process of another user has this id now
        except ProcessLookupError:
            file.unlink(missing_ok=True)  # another worker may delete it, too


class MetricsText:
    """The text of GET /metrics, rendered at most once a second for all callers."""

    def __init__(self, reader: LedgerReader, metrics: ExplorerMetrics) -> None:
        self._reader = reader
        self._metrics = metrics
        self._text = b""
        self._rendered_at = -math.inf  # time.monotonic()
        self._query: asyncio.Task[None] | None = None

    async def read(self) -> bytes:
        """Return the text. While the ledger is unavailable, gauges that are read from it keep their last values."""
        if self._is_old():
            if self._query is None or self._query.done():
                self._query = asyncio.create_task(self._refresh(), name="metrics")
            await asyncio.wait([self._query], timeout=_MAX_AGE_S)
        if self._is_old():  # of the callers that waited, the first one renders
            self._rendered_at, self._text = time.monotonic(), self._metrics.render()
        return self._text

    def _is_old(self) -> bool:
        return time.monotonic() - self._rendered_at >= _MAX_AGE_S

    async def _refresh(self) -> None:
        try:
            now = await self._reader.read(progress)
        except LedgerError:
            return
        self._metrics.claim_ready.set(now.ready)
        self._metrics.update_step.set(now.step)
        for one in self._metrics.shown_tripped().union(now.tripped):
            self._metrics.update_tripped.labels(*one).set(now.tripped.count(one))
        self._metrics.publish_version.set(now.newest)
        self._metrics.reload_lag.set(now.lag)
