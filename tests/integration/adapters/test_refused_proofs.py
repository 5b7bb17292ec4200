"""An adapter that a healthy engine refuses to score, as vLLM does if its logprobs are no numbers, is rejected."""

from __future__ import annotations

import pytest
from aiohttp import web

from tests.support.adapters import publish_and_wait, state
from tests.support.scripted_adapters import name_of, publish_row, write_adapter
from tests.support.scripted_answers import bad_request
from tests.support.scripted_engine import ScriptedEngine
from tests.support.servers import served, wait_until


class Overflowing(ScriptedEngine):
    """Computes no numbers with one adapter, which JSON cannot express."""

    overflows = ""  # the adapter's name

    @web.middleware
    async def _meet_faults(self, request, handler):
        if request.path == "/v1/completions" and (await request.json())["model"] == self.overflows:
            return bad_request("Out of range float values are not JSON compliant")
        return await super()._meet_faults(request, handler)


@pytest.fixture
def scripted_engine():
    made = Overflowing()
    yield made
    made.stop()


def test_a_new_adapter_that_is_not_scored_is_rejected_and_unloaded(explorer, scripted_engine):
    publish_and_wait(explorer, 1)
    write_adapter(explorer.config.root, 2)
    scripted_engine.overflows = name_of(explorer, 2)
    publish_row(explorer, 2)
    wait_until(lambda: state(explorer, 2) == "REJECTED")
    assert served(explorer) == "1"
    wait_until(lambda: [name[:7] for name in scripted_engine.script.adapters] == ["agent@1"])


def test_a_pinned_adapter_that_is_not_scored_is_rejected_and_unloaded(explorer, scripted_engine):
    explorer.http.post("/versions/0/promote").raise_for_status()
    write_adapter(explorer.config.root, 1)
    scripted_engine.overflows = name_of(explorer, 1)
    publish_row(explorer, 1)
    assert explorer.chat(model="agent@1").status_code == 404
    wait_until(lambda: state(explorer, 1) == "REJECTED" and not scripted_engine.script.adapters)
