"""Two engines of one explorer: the version that should answer does so from its first engine on."""

from __future__ import annotations

import pytest

from tests.support.adapters import publish_and_wait
from tests.support.servers import RunningExplorer, served, wait_until


@pytest.fixture
def explorer(start, second_engine) -> RunningExplorer:
    running = start(others=[second_engine])
    publish_and_wait(running, 1, 2, 3)
    wait_until(lambda: [engine.version for engine in running.deps.pool.engines] == [3, 3])
    return running


@pytest.mark.parametrize("back", [("/versions/1/promote", None), ("/rollback", {"to": 1})])
def test_an_earlier_version_answers_although_an_engine_cannot_load_it(explorer, second_engine, back):
    second_engine.script.refuses_lora = "no"
    assert explorer.http.post(back[0], json=back[1]).status_code == 200
    engines = explorer.deps.pool.engines
    wait_until(lambda: engines[0].version == 1 and engines[0].is_open and engines[1].is_open)
    assert {served(explorer) for _ in range(10)} == {"1"}
