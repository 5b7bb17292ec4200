"""Metrics, named `flywheel_<stage>_<what>_<unit>`. One object holds them; nothing is registered globally.

With `explorer.workers` the processes share their counts through the folder PROMETHEUS_MULTIPROC_DIR, so that whichever
of them is asked answers for all.
"""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ExplorerMetrics:
    """What the explorer counts; docs/metrics.md explains each."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.chat_requests = Counter("flywheel_chat_requests", "Chats by HTTP status", ["status"], registry=registry)
        self.chat_latency = Histogram(
            "flywheel_chat_latency_seconds", "Whole chat, engine included", buckets=_LATENCY_S, registry=registry
        )
        self.chat_engine = Histogram(
            "flywheel_chat_engine_seconds", "The engine's part of a chat", buckets=_LATENCY_S, registry=registry
        )
        self.chat_added = Histogram(
            "flywheel_chat_added_seconds",
            "A plain chat without the engine's part",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.chat_first_token = Histogram(
            "flywheel_chat_first_token_seconds", "Until a stream's first event", buckets=_LATENCY_S, registry=registry
        )
        self.chat_in_flight = Gauge(
            "flywheel_chat_in_flight_requests", "Chats at engines now", registry=registry, multiprocess_mode="livesum"
        )
        self.record_rows = Counter("flywheel_record_rows", "Samples stored, by result", ["result"], registry=registry)
        self.record_commit = Histogram(
            "flywheel_record_commit_seconds", "One durable write of the ledger", buckets=_LATENCY_S, registry=registry
        )
        self.feedback_receipts = Counter(
            "flywheel_feedback_receipts", "Receipts by state", ["state"], registry=registry
        )
        self.commit_rows = Counter("flywheel_commit_rows", "Rows made ready", registry=registry)
        self.reloads = Counter(
            "flywheel_reload_versions", "Versions taken up, by result", ["result"], registry=registry
        )
        self.reload_pause = Histogram(
            "flywheel_reload_pause_seconds",
            "How long an engine was paused for a reload",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.reload_version = Gauge(
            "flywheel_reload_version_number",
            "Version in service",
            ["engine"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.claim_ready = self._ledger_gauge("flywheel_claim_ready_rows", "Rows that wait for a trainer")
        self.update_step = self._ledger_gauge("flywheel_update_step_number", "Updates behind the trainer's saved state")
        self.publish_version = self._ledger_gauge("flywheel_publish_version_number", "Newest version published")
        self.reload_lag = self._ledger_gauge("flywheel_reload_lag_versions", "Newest version less the one in service")

        self._answered: dict[int, Any] = {}
        self._recorded = self.record_rows.labels("recorded")  # looking a label up costs a chat more than counting

    def count_answer(self, status: int, seconds: float) -> None:
        """A chat was answered: its HTTP status, and how long that took."""
        self.chat_latency.observe(seconds)
        counter = self._answered.get(status)
        if counter is None:
            counter = self._answered[status] = self.chat_requests.labels(str(status))
        counter.inc()

    def count_recorded(self, rows: int, quarantined: int) -> None:
        """Samples were stored, some of them out of the way."""
        self._recorded.inc(rows - quarantined)
        if quarantined:
            self.record_rows.labels("quarantined").inc(quarantined)

    def _ledger_gauge(self, name: str, meaning: str) -> Gauge:
        """What the ledger says, read when someone asks."""
        return Gauge(name, meaning, registry=self.registry, multiprocess_mode="livemostrecent")

    def render(self) -> bytes:
        """Prometheus text."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        text: bytes = generate_latest(registry)
        return text
