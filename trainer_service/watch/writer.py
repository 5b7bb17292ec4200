"""Writes the figures of training. It never stops or delays training.

The file and Prometheus are written in the trainer's own thread. TensorBoard, W&B and MLflow may block on a network:
each has a thread of its own, which drops records that do not fit its queue.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.config import TrainerConfig, WatchConfig
from shared.errors import ConfigError
from shared.log import StageLogger
from trainer_service.watch.jsonl import JsonLines
from trainer_service.watch.mlflow import MLflow
from trainer_service.watch.prometheus import MetricsServer, TrainerMetrics
from trainer_service.watch.record import Record, Sink
from trainer_service.watch.tensorboard import TensorBoard
from trainer_service.watch.wandb import WeightsAndBiases

log = StageLogger("update")
QUEUED = 256  # records
_PASSWORD = re.compile(r"://[^/\s]*@")  # a user and a password in a URL


def require_packages(settings: WatchConfig) -> None:
    """Raise ConfigError if the package of a configured output is not installed."""
    for package in ("tensorboard", "wandb", "mlflow"):
        if getattr(settings, package) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.watch.{package} is set, and the package {package} is not installed; install it beside "
                "Flywheel, or remove the key"
            )


class Watch:
    """Measures the time of each stage, and takes one record for each update. Call `close` at the end."""

    def __init__(self, config: TrainerConfig, folder: Path) -> None:
        """folder: the trainer's own. Raises StartupError for a port in use. See `require_packages`."""
        settings = config.watch
        makers = _output_factories(settings, config.name, folder)
        self._metrics = TrainerMetrics()
        self._sinks: dict[str, TrainerMetrics | JsonLines] = {"Prometheus": self._metrics}
        if settings.jsonl:
            self._sinks["JSONL"] = JsonLines(folder, int(settings.jsonl_mb * 1e6))
        self._endpoint = None if settings.port is None else MetricsServer(settings, self._metrics)
        self._outside = [Outside(name, make) for name, make in makers.items()]
        self._timeout_s = settings.timeout_s
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of this block to a stage of the current update."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def write(self, record: Record) -> None:
        """Write the record of a finished update. Errors are logged, once for each output."""
        record.seconds, self._seconds = {**record.seconds, **self._seconds}, {}
        for name, sink in self._sinks.items():
            try:
                sink.write(record)
            except OSError as error:
                self._warn_once(name, error)
        for output in self._outside:
            output.put(record)

    def show_trip(self, tripped: Mapping[str, Any] | None) -> None:
        """Show the tripped breaker as stored in the ledger; None: it is not tripped."""
        self._metrics.show_trip(tripped)

    def close(self) -> None:
        """Stop the endpoint; wait up to the timeout for records in the queues."""
        close_all(self._outside, self._timeout_s)
        if self._endpoint is not None:
            self._endpoint.close()

    def _warn_once(self, name: str, error: OSError) -> None:
        if name not in self._failed:
            log.warning("figures cannot be written; training goes on", where=name, reason=str(error))
        self._failed.add(name)


class Outside:
    """A thread that sends records to an output that may fail or block."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        """make: creates the output, in the thread."""
        self._name, self._make = name, make
        self._records: queue.Queue[Record | None] = queue.Queue(QUEUED)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="figures", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record, or drop it if the queue is full or the output has failed."""
        if not self._thread.is_alive():
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                log.warning("figures are left out: they are sent more slowly than they come", where=self._name)

    def ask_to_end(self) -> None:
        """Let the thread end once it has sent the records in the queue."""
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread. An output that blocks is abandoned."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            sink = self._make()
            while (record := self._records.get()) is not None:
                sink.write(record)
            sink.close()
        except Exception as error:  # noqa: BLE001 — boundary to code of others
            reason = _PASSWORD.sub("://…@", f"{type(error).__name__}: {error}".split("\n")[0])
            log.warning("figures are no longer sent; training goes on", where=self._name, reason=reason)


def close_all(outputs: Sequence[Outside], timeout_s: float) -> None:
    """Let all outputs send what is in their queues, for at most `timeout_s` together."""
    for output in outputs:
        output.ask_to_end()
    deadline = time.monotonic() + timeout_s
    for output in outputs:
        output.join(max(0.0, deadline - time.monotonic()))


def _output_factories(settings: WatchConfig, trainer: str, folder: Path) -> dict[str, Callable[[], Sink]]:
    """Return how to create each configured output."""
    makers: dict[str, tuple[object, Callable[[], Sink]]] = {
        "TensorBoard": (settings.tensorboard, lambda: TensorBoard(folder / "tensorboard")),
        "W&B": (settings.wandb, lambda: WeightsAndBiases(str(settings.wandb), trainer, folder)),
        "MLflow": (settings.mlflow, lambda: MLflow(str(settings.mlflow), trainer)),
    }
    return {name: make for name, (wanted, make) in makers.items() if wanted}
