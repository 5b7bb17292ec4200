"""Fixtures that more than one kind of test uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.lives import Lives
from tests.support.models import make_tiny_model
from tests.support.postgres import Postgres
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, make_config


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Of several workers one runs all tests on the real engines, which they share; of other tests one runs a file."""

    def _split_scope(self, nodeid: str) -> str:
        return "e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Each test begins with the usual umask: a command that a test before it ran in this process sets another."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def scripted_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server for the session."""
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str | None:
    """An empty database of each kind; None: SQLite in the root folder."""
    if request.param == "sqlite":
        return None
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def start_explorer(tmp_path: Path, database_url: str | None) -> Iterator[Callable[..., RunningExplorer]]:
    """Start explorers on tmp_path, all on one ledger; they are stopped afterwards. Runs on both databases."""
    running: list[RunningExplorer] = []

    def start(urls: list[str], **explorer: Any) -> RunningExplorer:
        running.append(RunningExplorer(make_config(tmp_path, urls, database_url=database_url, **explorer)))
        return running[-1]

    yield start
    for explorer in running:
        explorer.stop()


@pytest.fixture
def explorer(scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer]) -> RunningExplorer:
    """One explorer over one scripted engine, in service."""
    return start_explorer([scripted_engine.url]).wait_ready()


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
