"""docs/metrics.md and the code name the same metrics."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from explorer_service.metrics import ExplorerMetrics, MetricsText
from shared.ledger.queries import LedgerProgress
from trainer_service.watch.prometheus import TrainerMetrics

WORKER = """
import os
from explorer_service.metrics import ExplorerMetrics
metrics = ExplorerMetrics()
metrics.chat_in_flight.set({in_flight})
metrics.reload_version.labels("e0").set({version})
metrics.commit_rows.inc({rows})
print(metrics.render().decode(), flush=True)
os._exit(9)
"""


def documented(text: str) -> dict[str, tuple[str, set[str]]]:
    """The kind and the labels of each metric on the page."""
    rows = re.findall(r"^\| `(flywheel_\w+)` \| (\w+) \| ([\w, ]*)\|", text, re.MULTILINE)
    return {name.removesuffix("_total"): (kind, set(re.findall(r"\w+", labels))) for name, kind, labels in rows}


def test_every_metric_is_documented_with_its_kind_and_its_labels_and_every_documented_metric_exists():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    explorers, trainers = text.split("## The trainer")
    for page, metrics in ((explorers, ExplorerMetrics()), (trainers, TrainerMetrics())):
        for metric in [one for one in vars(metrics).values() if isinstance(one, MetricWrapperBase)]:
            if not any(family.samples for family in metric.collect()):  # it has labels
                _, labels = documented(page)[next(iter(metric.describe())).name]
                metric.labels(**dict.fromkeys(labels, "x"))  # raises ValueError for others than its own
        shown = {
            family.name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
            for family in metrics.registry.collect()
        }
        assert documented(page) == shown


def test_no_metric_has_the_name_of_another_service_s():
    explorers, trainers = ({f.name for f in m.registry.collect()} for m in (ExplorerMetrics(), TrainerMetrics()))
    assert not explorers & trainers


def test_of_a_worker_that_died_what_it_had_counted_stays_and_what_it_was_doing_does_not(tmp_path: Path):
    def shown(**values: int) -> dict[str, float]:
        environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        worker = [sys.executable, "-c", WORKER.format(**values)]
        text = subprocess.run(worker, env=environ, capture_output=True, text=True, timeout=60, check=False).stdout
        lines = (line.split(" ") for line in text.splitlines() if line.startswith("flywheel_"))
        return {name: float(value) for name, value in lines}

    assert shown(in_flight=3, version=7, rows=5)["flywheel_chat_in_flight_requests"] == 3
    later = shown(in_flight=1, version=6, rows=2)
    assert later["flywheel_chat_in_flight_requests"] == 1
    assert later['flywheel_reload_version_number{engine="e0"}'] == 6
    assert later["flywheel_commit_rows_total"] == 7


SCRAPED = """
import asyncio, sys
from explorer_service.metrics import ExplorerMetrics, MetricsText
from shared.ledger.queries import LedgerProgress, Tripped

class Reader:
    async def read(self, _query):
        return LedgerProgress(0, 0, 0, 0, [Tripped(*pair.split("=")) for pair in sys.argv[1:]])

text = asyncio.run(MetricsText(Reader(), ExplorerMetrics()).read()).decode()
print(*(line for line in text.splitlines() if line.startswith("flywheel_update_tripped_trainers{")), flush=True)
sys.stdin.read()
"""


def test_a_breaker_that_holds_no_longer_is_shown_so_by_a_worker_that_never_saw_it_hold(tmp_path: Path):
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    worker = [sys.executable, "-c", SCRAPED]
    series = 'flywheel_update_tripped_trainers{figure="kl",fix="lr"}'
    with subprocess.Popen(
        [*worker, "kl=lr"], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == f"{series} 1.0\n"
        other = subprocess.run(worker, env=environ, input="", capture_output=True, text=True, timeout=60, check=True)
        first.communicate("", timeout=60)
    assert other.stdout == f"{series} 0.0\n"


class Counted(ExplorerMetrics):
    """Counts how often it is rendered."""

    renderings = 0

    def render(self) -> bytes:
        self.renderings += 1
        return super().render()


class Reader:
    """A ledger that answers a little later."""

    async def read(self, _query: object) -> LedgerProgress:
        await asyncio.sleep(0.01)
        return LedgerProgress(ready=3, step=0, newest=0, lag=0, tripped=[])


def test_the_text_is_rendered_once_for_all_callers_that_wait_for_it():
    async def read_at_once() -> tuple[set[bytes], int]:
        metrics = Counted()
        text = MetricsText(Reader(), metrics)
        return set(await asyncio.gather(*(text.read() for _ in range(20)))), metrics.renderings

    (text,), renderings = asyncio.run(read_at_once())
    assert b"flywheel_claim_ready_rows 3.0" in text
    assert renderings == 1
