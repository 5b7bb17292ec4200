"""Fixtures that more than one kind of test uses."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import ssl
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from explorer_service.engines import admin
from services.supervisor import Child
from shared.config import Config
from shared.ledger.connect import Ledger
from tests.support.forms import DATABASES, on_one_database
from tests.support.lives import Lives
from tests.support.models import make_tiny_model
from tests.support.postgres import Postgres
from tests.support.scheduling import ByFile, sort_by_length
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: PyTorch's threads would wait for one another. It reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_database: its short form runs on one database, the long one on both")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        sort_by_length(items)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    made = yield
    return on_one_database(collector, made) if isinstance(made, list) else made


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Each test begins with the usual umask: a command that a test before it ran in this process sets another."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Each test begins with Python's signal handlers: a command that a test runs in this process sets others."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def schema_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A new SQLite ledger that this process opens is a copy of one that was migrated at the start of the session."""
    made = tmp_path_factory.mktemp("schema") / "ledger.sqlite3"
    Ledger.open(f"sqlite:///{made}").close()
    opened = Ledger.open

    def open_copy(url: str, *more: Any, **options: Any) -> Ledger:
        parsed = make_url(url)
        makes = options.get("create", True) and parsed.get_backend_name() == "sqlite" and parsed.database
        if makes and not Path(parsed.database).exists():
            with contextlib.suppress(OSError):  # the real one says what is wrong
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(made, parsed.database)
        return opened(url, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "open", open_copy)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_once() -> Iterator[None]:
    """httpx's clients share the contexts of TLS: each of them would read all certificates."""
    create, read = ssl.create_default_context, functools.cache(lambda file: create(cafile=file))

    def create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
        return create(*args, **options) if args or set(options) != {"cafile"} else read(options["cafile"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield


@pytest.fixture
def scripted_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture
def second_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the session."""
    server = Postgres(in_memory=True)
    yield server
    server.stop()


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """An empty ledger of each kind; None: SQLite in the root folder. See tests.support.forms.one_database."""
    if request.param == "sqlite":
        yield None
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_ledger()
    yield url
    server.drop(url)


@pytest.fixture
def config(tmp_path: Path, database_url: str | None) -> Config:
    """For commands: no engine answers."""
    return make_config(tmp_path, ["http://127.0.0.1:1"], database_url=database_url)


@pytest.fixture
def ledger(config: Config) -> Iterator[Ledger]:
    """The ledger of `config`, and of explorers that `start_explorer` starts."""
    opened = Ledger.open(config.ledger_url)
    yield opened
    opened.close()


@pytest.fixture
def start_explorer(tmp_path: Path, database_url: str | None) -> Iterator[Callable[..., RunningExplorer]]:
    """Start explorers on tmp_path, all on one ledger; they are stopped afterwards. Runs on both databases.

    They have patience with an engine's health: on a busy machine the scripted engine's thread may get no time.
    """
    running: list[RunningExplorer] = []

    def start(urls: list[str], **explorer: Any) -> RunningExplorer:
        running.append(RunningExplorer(make_config(tmp_path, urls, database_url=database_url, **explorer)))
        return running[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "HEALTH_TIMEOUT_S", 60.0)
        yield start
        for explorer in running:
            explorer.stop()


@pytest.fixture
def explorer(scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer]) -> RunningExplorer:
    """One explorer over one scripted engine, in service."""
    return start_explorer([scripted_engine.url]).wait_ready()


@pytest.fixture
def patient_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without an answer for some seconds is slow: it is neither closed nor resumed."""
    monkeypatch.setattr("explorer_service.engines.admin.HEALTH_TIMEOUT_S", 240.0)
    monkeypatch.setattr("explorer_service.reload.health.STALLED_AFTER_S", 240.0)


@pytest.fixture
def lasting_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explorer that stands still for some seconds goes on to own its engines."""
    for module in ("transitions", "transitions.engine_leases"):
        monkeypatch.setattr(f"shared.ledger.{module}.ENGINE_LEASE_S", 3600.0)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The children that a command would supervise; none of them starts."""
    children: list[Child] = []

    class Composed:
        def __init__(self, given: list[Child], *_: object) -> None:
            children.extend(given)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("services.supervisor.Supervisor", Composed)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # restored afterwards
    return children


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Commands as forks of one process that has imported everything."""
    forks = Lives(tmp_path_factory.mktemp("lives") / "log")
    yield forks
    forks.stop()
