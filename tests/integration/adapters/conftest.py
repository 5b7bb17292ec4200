"""Explorers whose engine serves adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.ledger.queries import list_versions
from tests.support.adapters import state
from tests.support.scripted_adapters import publish_base, write_base
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import RunningExplorer, wait_until

RELOAD = {"poll_interval_s": 0.02, "retry_s": 0.1, "unpin_after_s": 60.0}


@pytest.fixture
def database_url():
    """SQLite alone: what depends on the database is tested in test_adapter_leases.py."""
    return


@pytest.fixture
def start(scripted_engine, start_explorer, tmp_path) -> Callable[..., RunningExplorer]:
    """An explorer whose engine serves the base; `room`: for how many pins; `others`: further engines."""

    def start(room: int = 6, others: Sequence[ScriptedEngine] = (), **reload: Any) -> RunningExplorer:
        all_engines = [scripted_engine, *others]
        explorer = start_explorer(
            [one.url for one in all_engines],
            model={"kind": "lora"},
            engine={"max_loras": 2, "max_cpu_loras": room + 2},
            reload={**RELOAD, **reload},
            engine_wait_s=60.0,
        )
        with explorer.ledger.read() as connection:
            is_first = not list_versions(connection)
        if is_first:
            base = write_base(tmp_path)
            for one in all_engines:
                one.start_on(base)
            publish_base(explorer)
            wait_until(lambda: state(explorer, 0) == "SERVING")
        return explorer.wait_ready()

    return start


@pytest.fixture
def explorer(start) -> RunningExplorer:
    return start()
