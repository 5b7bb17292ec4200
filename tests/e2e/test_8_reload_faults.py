"""The rest of the fault table on the real engine: it dies, hangs, or has no disk in a take-up; the ledger is away."""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import select

from benchmarks.reload.service import Publisher
from shared.config import Config
from shared.ledger.connect import Ledger
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences, load_failures
from shared.versions import version_label, version_path
from tests.e2e.test_5_reload import STREAMS, Streams, check_tokens, label, serving
from tests.support.failing_ledger import failing_statements
from tests.support.folder_faults import WRONG_PROBE, publish_copy
from tests.support.forms import FULL
from tests.support.models import make_tiny_model
from tests.support.processes import Process, wait_for, write_config
from tests.support.relay import Relay
from tests.support.servers import RunningExplorer, free_port, make_config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not FULL, reason="minutes of engines that start"),
]
RELOAD = {"poll_interval_s": 0.1, "retry_s": 1.0, "timeout_s": 6.0, "answer_timeout_s": 10.0}
WHOLE = {"data: [DONE]"}


@dataclass
class Service:
    """A real engine, a relay before it, an explorer in this process, and who publishes."""

    engine: Process
    relay: Relay
    explorer: RunningExplorer
    publisher: Publisher
    engine_url: str

    @property
    def config(self) -> Config:
        return self.explorer.config

    @property
    def http(self) -> httpx.Client:
        return self.explorer.http

    @property
    def ledger(self) -> Ledger:
        return self.explorer.ledger

    def status(self) -> dict[str, Any]:
        """Asked again when it meets a fault of the ledger."""
        reply = wait_for(lambda: (found := self.http.get("/status")).status_code == 200 and found, "the status", 20)
        status: dict[str, Any] = reply.json()
        return status

    def launcher(self) -> psutil.Process:
        """`flywheel engine`."""
        return psutil.Process(self.engine.pid).children()[0]

    def vllm(self) -> psutil.Process:
        return self.launcher().children()[0]

    def kill(self) -> bool:
        """The engine is dead, and the request for it goes nowhere."""
        launcher = self.launcher()
        for process in launcher.children(recursive=True):
            process.kill()
        launcher.wait(30)
        return False

    def hang(self, seconds: float) -> bool:
        """What computes in the engine stands still for so long; its server does not."""
        computing = self.vllm().children(recursive=True)
        for process in computing:
            process.send_signal(signal.SIGSTOP)
        wake = threading.Timer(seconds, lambda: [process.send_signal(signal.SIGCONT) for process in computing])
        wake.start()
        return True

    def publish(self) -> int:
        """A version with weights of its own."""
        self.publisher.prepare()
        return self.publisher.publish()

    def row(self, version: int) -> Any:
        with self.ledger.read() as connection:
            return next(row for row in list_versions(connection) if row.version == version)

    def wait_serving(self, version: int, chats: Streams | None = None) -> None:
        """Until the engine is open on the version, as ledger and engine say; then what was recorded is checked."""
        wait_for(lambda: self.http.get("/ready").status_code == 200 and serving(self) == version, "service", 240)  # type: ignore[arg-type]
        assert label(self) == version_label(version, self.config.root / version_path(version))  # type: ignore[arg-type]
        assert self.row(version).state == "SERVING"
        if chats is not None:
            whole = {msg_id for msg_id, end in chats.ends.items() if end in WHOLE}
            wait_for(lambda: recorded(self.ledger, chats) == whole, "the rows of whole streams, and no others", 20)
            check_tokens(self.config.root, self.ledger, whole)


def recorded(ledger: Ledger, chats: Streams) -> set[str]:
    with ledger.read() as connection:
        query = select(experiences.c.msg_id).where(experiences.c.msg_id.in_(chats.ids))
        return set(connection.execute(query).scalars())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root, port = tmp_path_factory.mktemp("faults"), free_port()
    make_tiny_model(root / "base", tied=True)
    url = f"http://127.0.0.1:{port}"
    engine = {"max_model_len": 256, "staging_dir": str(root / "staged")}
    file = write_config(make_config(root, [url], engine=engine), root / "flywheel.yaml")
    arguments = ["up", "-c", str(file), "--without", "explorer", "--without", "trainer"]
    with Process(arguments, root / "engine.log") as process, ExitStack() as stack:
        wait_for(lambda: _is_healthy(process, url), "an engine", 240, 0.5)
        relay = Relay(port)
        stack.callback(relay.stop)
        explorer = RunningExplorer(
            make_config(root, [relay.url], engine=engine, reload=RELOAD, ledger_timeout_s=20.0, engine_wait_s=200.0)
        )
        stack.callback(explorer.stop)
        wait_for(lambda: explorer.http.get("/ready").status_code == 200, "service", 240)
        service = Service(process, relay, explorer, Publisher(explorer.config, explorer.ledger), url)
        service.wait_serving(service.publish())
        yield service
        stack.close()
        assert process.stop(60) == 0, process.output()[-2000:]


def _is_healthy(process: Process, url: str) -> bool:
    assert process.alive, process.output()[-2000:]
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_load_that_takes_too_long_twice_is_given_up_and_all_streams_are_whole(service):
    good = serving(service)

    def hang() -> bool:
        return service.hang(RELOAD["timeout_s"] + 0.5)

    with Streams(service) as chats:
        service.relay.on_call["/collective_rpc"] = hang
        version = service.publish()
        wait_for(lambda: failures(service, version) == 1, "the first verdict", 240)
        service.relay.on_call["/collective_rpc"] = hang
        row = wait_for(lambda: (found := service.row(version)).state == "FAILED" and found, "the second one", 240)
        assert "took too long" in row.reason
    assert set(chats.ends.values()) == WHOLE
    service.wait_serving(good, chats)
    service.wait_serving(service.publish())


def failures(service: Service, version: int) -> int:
    with service.ledger.read() as connection:
        return list(connection.execute(select(load_failures.c.version)).scalars()).count(version)


def test_a_full_disk_while_staging_leaves_the_engine_serving(service):
    good, held = serving(service), label(service)
    with Streams(service) as chats, limited(service.launcher().pid, 100_000):
        version = service.publish()
        reason = "cannot be staged in engine.staging_dir (File too large)"
        wait_for(lambda: reason in str(service.status()["engines"]), "the reason", 240)
        assert serving(service) == good and label(service) == held
        assert service.row(version).state == "PUBLISHED"
    assert set(chats.ends.values()) == WHOLE
    service.wait_serving(version, chats)


@contextmanager
def limited(pid: int, file_bytes: int) -> Iterator[None]:
    """The kernel lets a process write no larger files."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_good", [True, False], ids=["good", "wrong probe"])
def test_the_ledger_fails_at_any_statement_and_all_ends_in_order(service, is_good):
    with failing_statements() as ledger:
        take_up(service, is_good)
        statements = list(ledger.met)
        for statement in statements:
            ledger.arm(1, statement)
            take_up(service, is_good)
            assert ledger.refused == statement
    assert len(statements) >= 6


def take_up(service: Service, is_good: bool) -> None:
    """A version is taken up with streams in flight, or the one before goes back in."""
    good = serving(service)  # type: ignore[arg-type]
    with Streams(service) as chats:  # type: ignore[arg-type]
        wrong = partial(publish_copy, service.config.root, service.ledger, good, WRONG_PROBE)
        version = service.publish() if is_good else wrong()
        wait_for(lambda: service.row(version).state in ("SERVING", "REJECTED"), "the end", 240)
    assert not is_good or set(chats.ends.values()) == WHOLE
    service.wait_serving(version if is_good else good, chats)


def test_a_full_disk_while_publishing_leaves_the_engine_serving(service, tmp_path):
    trainer = {"name": "other", "batch_size": 8, "batch_timeout_s": 1.0, "learning_rate": 1e-3, "cpu_threads": 1}
    trainer["breaker"] = {"change_of_update": None}
    settings = service.config.model_dump(mode="json", exclude_unset=True) | {"trainer": trainer}
    file = write_config(Config.model_validate(settings), tmp_path / "flywheel.yaml")
    good = serving(service)
    for number in range(8):
        msg_id = service.explorer.chat(max_tokens=8).raise_for_status().json()["id"]
        rating = {"msg_ids": [msg_id], "reward": float(number % 2)}
        service.http.post("/feedback", json=rating).raise_for_status()
    service.http.post("/commit").raise_for_status()
    full = json.dumps({"version": 3, "state": 1})
    with Process(["trainer", "-c", str(file)], tmp_path / "log", "tests.support.faults", FULL_DISK=full) as running:
        wait_for(lambda: "the disk is full" in running.output() or not running.alive, "a full disk", 120)
        with Streams(service) as chats:
            assert "No space left on device" in str(service.status()["trainers"])
            assert serving(service) == good
        assert set(chats.ends.values()) == WHOLE
        version = wait_for(lambda: (found := serving(service)) > good and found, "a version", 120)
        service.wait_serving(version, chats)
        assert running.output().count("the disk is full") == 4
        assert running.stop() == 0


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume", "/v1/completions"])
def test_an_engine_that_is_killed_in_a_take_up_comes_back_and_takes_it_up(service, path):
    service.relay.on_call[path] = service.kill
    service.publisher.prepare()  # may take longer than a stream
    with Streams(service) as chats:
        version = service.publisher.publish()
    assert path not in service.relay.on_call, "the engine was not asked"
    assert len(chats.ends) == STREAMS
    service.wait_serving(version, chats)
    assert failures(service, version) <= 1  # none if it was killed before the load
