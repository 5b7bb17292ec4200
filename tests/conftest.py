"""Fixtures that more than one kind of test uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_engine import ScriptedEngine
from tests.servers import RunningExplorer, make_config


@pytest.fixture
def scripted_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.stop()


@pytest.fixture
def start_explorer(tmp_path: Path) -> Iterator[Callable[..., RunningExplorer]]:
    """Start explorers on tmp_path; they are stopped afterwards."""
    running: list[RunningExplorer] = []

    def start(urls: list[str], **explorer: Any) -> RunningExplorer:
        running.append(RunningExplorer(make_config(tmp_path, urls, **explorer)))
        return running[-1]

    yield start
    for explorer in running:
        explorer.stop()


@pytest.fixture
def explorer(scripted_engine: ScriptedEngine, start_explorer: Callable[..., RunningExplorer]) -> RunningExplorer:
    """One explorer over one scripted engine, in service."""
    return start_explorer([scripted_engine.url]).wait_ready()
