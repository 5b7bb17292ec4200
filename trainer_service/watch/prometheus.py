"""The trainer's own Prometheus endpoint; docs/metrics.md explains each metric.

The explorer's metrics belong to another process; the two share no names.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from shared.config import WatchConfig
from shared.errors import StartupError
from trainer_service.watch.record import Record

_STAGE_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
VERSIONS = 16  # newest versions whose reward is shown


class TrainerMetrics:
    """The metrics of a trainer. One object owns them; nothing is registered globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        about: dict[str, Any] = {"registry": self.registry}
        self._figure = Gauge("flywheel_update_figure_number", "The last update's figures", ["figure"], **about)
        self._shown: set[str] = set()  # names of figures
        self._rows = Counter("flywheel_update_rows", "Rows trained on, or of no use to any algorithm", ["use"], **about)
        self._signals = Counter("flywheel_update_signals_rows", "Rows by what was said of them", ["kind"], **about)
        self._tokens = Counter("flywheel_update_tokens", "Tokens that updates computed, in all passes", **about)
        self._reward = Gauge("flywheel_update_reward_mean", "Mean reward by version", ["version"], **about)
        self._stages = Histogram(
            "flywheel_update_stage_seconds", "Time of an update by stage", ["stage"], buckets=_STAGE_S, **about
        )
        self._tripped = Gauge(
            "flywheel_update_tripped_number", "1 while the breaker holds", ["figure", "bound", "fix"], **about
        )

    def write(self, record: Record) -> None:
        for name in self._shown - record.figures.keys():
            self._figure.remove(name)
        self._shown = set(record.figures)
        for name, value in record.figures.items():
            self._figure.labels(name).set(value)
        unused = record.figures.get("rows_unused", 0.0)
        self._rows.labels("unused").inc(unused)
        self._rows.labels("trained").inc(record.figures.get("rows", unused) - unused)
        self._tokens.inc(record.figures.get("tokens_computed", 0.0))
        for kind, count in record.signals.items():
            self._signals.labels(kind).inc(count)
        for stage, seconds in record.seconds.items():
            self._stages.labels(stage).observe(seconds)
        self._reward.clear()
        for rewards in record.rewards[-VERSIONS:]:
            self._reward.labels(str(rewards.version)).set(rewards.mean)

    def show_trip(self, tripped: Mapping[str, Any] | None) -> None:
        """Show the figure that tripped the breaker, the setting of its bound, and the fix; None: show nothing."""
        self._tripped.clear()
        if tripped is not None:
            self._tripped.labels(*(str(tripped.get(name, "")) for name in ("figure", "setting", "fix"))).set(1)


class MetricsServer:
    """Serves the metrics at GET /metrics until `close`."""

    def __init__(self, config: WatchConfig, metrics: TrainerMetrics) -> None:
        """Raises StartupError if the port is not available."""
        assert config.port is not None
        try:
            served: tuple[WSGIServer, Thread] = start_http_server(config.port, config.host, metrics.registry)
        except OSError as exc:
            raise StartupError(
                f"trainer.watch.port={config.port} cannot be listened on at {config.host} ({exc.strerror}); choose "
                "another port"
            ) from exc
        self._server, self._thread = served

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
